"""dflashctl: ship, launch, watch and kill DFlash drafter training in a container on a GPU host."""

__version__ = "0.1.0"
