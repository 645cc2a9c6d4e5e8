"""The embedded lab: a Proxmox host with containers and simulated GPUs, in namespaces of this machine."""
