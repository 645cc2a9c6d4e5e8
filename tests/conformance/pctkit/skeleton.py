"""A small root file system for test containers: folders and a few files of its own, programs from the
machine's /usr (to be bound read-only). Ready in milliseconds, nothing to download."""

from __future__ import annotations

import shutil
from pathlib import Path

TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
PASSWD = """root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
GROUP = "root:x:0:\ndaemon:x:1:\nmail:x:8:\nnogroup:x:65534:\n"
# As Debian's: a login shell of root gets the full search path.
PROFILE = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nexport PATH\n"


def build(root: Path, hostname: str) -> list[str]:
    """Make the root file system and return the machine's folders to bind into it, read-only."""
    for name in (
        "dev",
        "etc",
        "proc",
        "root",
        "run",
        "srv/shared",
        "sys",
        "tmp",
        "usr",
        "var/tmp",
        "home",
        "opt",
    ):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "root").chmod(0o700)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name, text in {
        "passwd": PASSWD,
        "group": GROUP,
        "profile": PROFILE,
        "hostname": f"{hostname}\n",
        "hosts": "127.0.0.1 localhost\n",
    }.items():
        (root / "etc" / name).write_text(text)
    for name in ("ld.so.cache", "alternatives"):
        source = Path("/etc", name)
        if source.is_dir():
            shutil.copytree(source, root / "etc" / name, symlinks=True)
        elif source.exists():
            shutil.copy(source, root / "etc" / name)
    bound = ["/usr"]
    for name in TOP:
        machine = Path("/", name)
        if machine.is_symlink():
            (root / name).symlink_to(machine.readlink())
        elif machine.is_dir():
            (root / name).mkdir()
            bound.append(str(machine))
    return bound
