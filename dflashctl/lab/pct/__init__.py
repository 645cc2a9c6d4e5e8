"""A strict stand-in for Proxmox's `pct`: same arguments, same messages, same exit codes, same traps.

One implementation serves two backends: real LXC containers (the tests' bed) and user namespaces (the embedded
lab). What it imitates, and on what evidence, is written down in docs/pct.md; tests/conformance holds it to
that. Standard library only, and few imports: it is started once a call.
"""
