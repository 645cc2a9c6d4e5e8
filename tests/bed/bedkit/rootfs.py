"""Root file systems for the containers: made once by mmdebstrap, kept under a cache keyed by what is in them.

A container never writes to them: each lays an overlay on top. An unprivileged container needs every owner
shifted to its range of the host's ids, so it has a shifted copy of its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ID_BASE = 100000
ID_COUNT = 65536

_RECIPE = "2"
"""Change it when what is made below changes, so that an old cache is not used."""
BUILD_S = 900
_LEAVE_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")

INIT = """#!/bin/sh
# The container's first process: reaps, and ends when it is told to (lxc-stop sends PWR).
trap 'exit 0' TERM INT PWR
while :; do sleep 3600 & wait $!; done
"""


class RootfsError(RuntimeError):
    """A root file system could not be made; the text has mmdebstrap's last words."""


def cache_dir() -> Path:
    """Outside the repository, shared by all checkouts of this machine, searchable for the containers' ids."""
    return Path(os.environ.get("DFLASHCTL_BED_CACHE", "/var/cache/dflashctl-bed"))


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o711)
    with open(cache / "lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # a second test process waits for the first one's build
        yield


def ensure(suite: str, include: tuple[str, ...], *, shifted: bool) -> Path:
    """The tree of a Debian suite with these packages (beside minbase and procps), made if it is not there
    yet: 15 to 25 s. Raises RootfsError."""
    packages = ("procps", *include)
    key = hashlib.sha256(repr((_RECIPE, suite, packages)).encode()).hexdigest()[:10]
    cache = cache_dir()
    with _locked(cache):
        plain = cache / f"{suite}-{key}"
        if not plain.exists():
            _build(plain, suite, packages)
        if not shifted:
            return plain
        copy = cache / f"{suite}-{key}-shifted"
        if not copy.exists():
            part = _fresh(copy)
            subprocess.run(["cp", "-a", f"{plain}/.", str(part)], check=True, timeout=300)
            shift(part)
            part.rename(copy)
        return copy


def _fresh(target: Path) -> Path:
    """An empty folder beside it. What killed builds left goes, but nothing that is mounted there."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for old in target.parent.glob(f"{target.name}.part*"):
        if not any(at.startswith(f"{old}/") for at in mounts):  # such as this machine's own /dev
            shutil.rmtree(old, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    part.chmod(0o755)
    return part


def _build(target: Path, suite: str, packages: tuple[str, ...]) -> None:
    part = _fresh(target)
    argv = [
        # Its programs and its mounts end with it, also where it is killed: it mounts /proc, /sys and /dev.
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--format=directory",
        f"--include={','.join(packages)}",
    ]
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEAVE_OUT]
    try:
        done = subprocess.run([*argv, suite, str(part)], capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        raise RootfsError(f"mmdebstrap {suite} was not done after {BUILD_S} s: a slow mirror?") from None
    if done.returncode != 0:
        raise RootfsError(f"mmdebstrap {suite}: {done.stderr[-1500:].strip()}")
    for old in (part / "dev").iterdir():
        old.unlink() if not old.is_dir() or old.is_symlink() else shutil.rmtree(old)
    for folder in ("workspace", "srv/host", "srv/small", "run/nvidia-lab"):
        (part / folder).mkdir(parents=True, exist_ok=True)
    init = part / "sbin" / "ctinit"
    init.write_text(INIT)
    init.chmod(0o755)
    part.rename(target)


def shift(tree: Path) -> None:
    """Move every owner and group of the tree up by ID_BASE."""
    for folder, folders, files in os.walk(tree):
        for name in ("", *folders, *files):
            path = os.path.join(folder, name) if name else folder  # noqa: PTH118
            s = os.lstat(path)
            if s.st_uid < ID_BASE:
                os.lchown(path, s.st_uid + ID_BASE, s.st_gid + ID_BASE)
                if not stat.S_ISLNK(s.st_mode):
                    os.chmod(path, stat.S_IMODE(s.st_mode))  # noqa: PTH101  a chown drops setuid bits
