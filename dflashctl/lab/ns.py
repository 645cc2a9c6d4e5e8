"""The few system calls that namespaces need, through ctypes: no util-linux at hand is assumed, and an error
says which call failed. Standard library only; works under `python -I -S`."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CONTAINER_FLAGS = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC
"""The network is shared: everything in the lab talks over the machine's loopback."""

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_NODIRATIME = 0x800
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_RELATIME = 0x200000
MNT_DETACH = 2

_PR_SET_NAME = 15
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1
_SYS_MOUNT_SETATTR = 442  # the same on every architecture

# pivot_root(2) has no wrapper in the C library; numbers from the kernel's unistd headers.
_SYS_PIVOT_ROOT = {
    "x86_64": 155,
    "aarch64": 41,
    "riscv64": 41,
    "loongarch64": 41,
    "ppc64le": 203,
    "s390x": 217,
}

_libc = ctypes.CDLL(None, use_errno=True)

_OPTION_FLAGS = {
    "ro": MS_RDONLY,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
    "nodiratime": MS_NODIRATIME,
    "relatime": MS_RELATIME,
}


class StageError(OSError):
    """A step on the way into the namespaces failed. `stage` names it: unshare, map, mount, proc, pivot."""

    def __init__(self, stage: str, error: OSError, detail: str = "") -> None:
        super().__init__(error.errno, error.strerror)
        self.stage = stage
        self.detail = detail

    def __str__(self) -> str:
        about = f" {self.detail}" if self.detail else ""
        return f"{self.stage}{about}: {self.strerror}"


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError with the target."""
    _check(
        _libc.mount(
            source.encode(),
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        ),
        target,
    )


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Bind source and all mounts below it onto target (file onto file, folder onto folder)."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        make_read_only(target)


def make_read_only(target: str) -> None:
    """Make the mount at target, and every mount below it, read-only."""

    class MountAttr(ctypes.Structure):
        _fields_ = [
            ("attr_set", ctypes.c_uint64),
            ("attr_clr", ctypes.c_uint64),
            ("propagation", ctypes.c_uint64),
            ("userns_fd", ctypes.c_uint64),
        ]

    wanted = MountAttr(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    done = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(wanted),
        ctypes.c_size_t(ctypes.sizeof(wanted)),
    )
    if done == 0:
        return
    # Before Linux 5.12: one mount after the other. Flags that a mount has must be named again, or the kernel
    # refuses (they are locked in a user namespace).
    for point, options in mounts_below(Path("/proc/self/mountinfo").read_text(), target):
        flags = sum(_OPTION_FLAGS.get(option, 0) for option in options) | MS_RDONLY
        mount("none", point, flags=MS_BIND | MS_REMOUNT | flags)


def mounts_below(mountinfo: str, target: str) -> list[tuple[str, list[str]]]:
    """(mount point, options) of the mount at target and of those below it, from /proc/self/mountinfo's
    text."""
    found = []
    for line in mountinfo.splitlines():
        fields = line.split()
        point = (
            fields[4].encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")
        )
        if point == target or point.startswith(target.rstrip("/") + "/"):
            found.append((point, fields[5].split(",")))
    return found


def pivot(new_root: str, old: str) -> None:
    """Make new_root (a mount point) the root; the old one appears at `old`, a folder inside it."""
    number = _SYS_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(38, f"pivot_root's number on {platform.machine()} is not known")
    _check(
        _libc.syscall(ctypes.c_long(number), os.fsencode(new_root), os.fsencode(new_root + old)), "pivot_root"
    )
    os.chdir("/")


def detach(target: str) -> None:
    """Take the mount tree at target out of sight."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), target)


def set_hostname(name: str) -> None:
    encoded = name.encode()
    _check(_libc.sethostname(encoded, ctypes.c_size_t(len(encoded))), "sethostname")


def set_process_name(name: str) -> None:
    """The thread's name as `ps` shows it (15 bytes)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def enter(flags: int = CONTAINER_FLAGS) -> None:
    """Move this process (one thread only) into new namespaces, as root of the new user namespace.

    One user is mapped: root inside is the caller outside. New pid namespaces hold the children from now on,
    not the caller. Raises StageError with stage `unshare`, `map` or `mount`.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        _check(_libc.unshare(ctypes.c_int(flags)), "unshare")
    except OSError as error:
        raise StageError("unshare", error) from None
    try:
        Path("/proc/self/setgroups").write_text(
            "deny"
        )  # the kernel asks for it before an unprivileged gid_map
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise StageError("map", error) from None
    try:
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
    except OSError as error:
        raise StageError("mount", error, "/ as private") from None


def reset_signals() -> None:
    """Default handlers and an empty mask, as a fresh program expects."""
    for number in range(1, signal.NSIG):
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # numbers that the C library keeps for itself
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def close_all_but(*keep: int) -> None:
    """Close every descriptor above 2 but those."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:  # the listing's own
                continue
