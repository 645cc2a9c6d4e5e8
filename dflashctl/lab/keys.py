"""The lab's key pairs and its known_hosts: made for one lab, used nowhere else."""

from __future__ import annotations

import os
from pathlib import Path


def make_keys(ssh_dir: Path) -> None:
    """Write id_ed25519(.pub) and host_ed25519(.pub), private ones with mode 0600; existing ones are kept."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for name in ("id_ed25519", "host_ed25519"):
        private = ssh_dir / name
        if private.exists():
            continue
        key = Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        text = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        (ssh_dir / f"{name}.pub").write_bytes(public + b" dflashctl-lab\n")
        aside = ssh_dir / f"{name}.tmp"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text)
        aside.replace(private)
