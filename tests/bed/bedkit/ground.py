"""The ground that a bed is built on: its ids, its folder and what earlier beds left, trees, keys and
users."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import TextIO

from dflashctl.lab.gpu import setup

from .containers import Container, standard
from .plan import OPERATOR, OPERATOR_UID, Layout
from .rootfs import ID_BASE, cache_dir, ensure

BEDS, PREFIX = Path("/var/tmp"), "dflashctl-bed-"
START_S = 30.0
CGROUPS = Path("/sys/fs/cgroup")


class BedError(RuntimeError):
    """The bed cannot start, or one of its own commands failed; the text has that command's words."""


def claim_ids() -> tuple[TextIO, int]:
    """Ten container ids that no other bed on this machine uses, and the lock that keeps them."""
    folder = cache_dir() / "ids"
    folder.mkdir(parents=True, exist_ok=True)
    for slot in range(80):
        lock = open(folder / str(slot), "w")  # noqa: SIM115  held for the life of the bed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, 200 + 10 * slot
        except BlockingIOError:
            lock.close()
    raise BedError("80 beds run on this machine already")


def cgroup_roots() -> list[Path]:
    """Where LXC makes groups, in each hierarchy: below the top, or below the group that we ourselves are
    in."""
    roots = [CGROUPS, *(p for p in CGROUPS.iterdir() if p.is_dir())] if CGROUPS.is_dir() else []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        folder = controllers.removeprefix("name=")
        roots += [top / path.lstrip("/") for top in (CGROUPS / (folder or "unified"), CGROUPS)]
    return [p for p in dict.fromkeys(roots) if p.is_dir()]


def tree_of(ct: Container) -> Path:
    """The container's root file system, made if it is not in the cache."""
    return ensure(ct.suite, ct.include, shifted=ct.unprivileged)


def make_trees() -> None:
    """All of them, before anything runs. Raises RootfsError."""
    for ct in standard():
        tree_of(ct)


def sweep(beds: Path) -> None:
    """Remove the folders of beds whose owners were killed: nobody holds their lock. Their processes and
    mounts went with their namespaces."""
    for folder in beds.glob(f"{PREFIX}*"):
        try:
            with open(folder / "owner", "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, or just being made


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def prepare(at: Layout) -> None:
    """The host's folders, GPUs, keys and users."""
    for folder in (
        at.lxc,
        at.bin,
        at.ssh,
        at.home,
        at.operator_home,
        at.shared,
        at.dev,
        at.upper,
        at.top / "etc",
    ):
        folder.mkdir(mode=0o711)
    at.shared.chmod(0o777)
    at.home.chmod(0o700)
    os.chown(at.operator_home, OPERATOR_UID, OPERATOR_UID)
    setup(at.gpu)
    (at.bin / "nvidia-smi").symlink_to(at.gpu / "bin" / "nvidia-smi")
    for name in ("host_key", "user_key"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(at.ssh / name)]
        subprocess.run(argv, check=True, timeout=30)
    shutil.copyfile(at.ssh / "user_key.pub", at.ssh / "authorized_keys")
    (at.ssh / "authorized_keys").chmod(0o644)
    etc = at.top / "etc"
    etc.chmod(0o755)
    passwd = Path("/etc/passwd").read_text()
    (etc / "passwd").write_text(
        f"{passwd}{OPERATOR}:x:{OPERATOR_UID}:{OPERATOR_UID}::{at.operator_home}:/bin/sh\n"
    )
    for name in ("subuid", "subgid"):
        (etc / name).write_text(f"root:{ID_BASE}:65536\n")


def forget_cgroups(vmid: int) -> None:
    """Remove the control groups that a bed which was killed left for this id. Its processes may still be
    on their way out, so this waits for them."""
    tops = [root / name / str(vmid) for root in cgroup_roots() for name in ("lxc", "lxc.monitor")]
    end = time.monotonic() + START_S
    while left := [top for top in tops if top.is_dir()]:
        for top in left:
            for folder, _, _ in os.walk(top, topdown=False):
                try:
                    Path(folder).rmdir()
                except OSError:
                    pass
        if time.monotonic() > end:
            raise BedError(f"{left[0]} is in use by something that is no bed")
        time.sleep(0.01)
