"""The bed: a host that behaves like a Proxmox host, in its own namespaces on this machine. See bed.py."""
