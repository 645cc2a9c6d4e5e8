"""Simulated GPUs: a driver process that knows who holds each device, and an `nvidia-smi` that asks it.

The truth is independent of dflashctl: a holder is any process that has /dev/nvidiaN open, found through
/proc. Use: `setup(gpu_dir)`, then `python -m dflashctl.lab.gpu.driver GPU_DIR` in the host's namespaces, bind
what setup.py lists, and change faults with `state.change`."""

from dflashctl.lab.gpu.setup import HOOK_DIR, device_files, setup
from dflashctl.lab.gpu.state import Box, Gpu, change, load, save

__all__ = ["HOOK_DIR", "Box", "Gpu", "change", "device_files", "load", "save", "setup"]
