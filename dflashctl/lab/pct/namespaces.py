"""Entering a container's namespaces by its first process, and refusing when that cannot be done whole."""

from __future__ import annotations

import os

from dflashctl.lab.pct.errors import AttachError

# The order in which lxc-attach's namespaces can be joined: the user namespace first (it gives the right to
# the others), the mount namespace last (after it, /proc is the container's).
_KINDS = {
    "user": 0x10000000,
    "cgroup": 0x02000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
# Without these two of its own a "container" would be the machine itself.
_ESSENTIAL = ("pid", "mnt")


def open_all(pid: int) -> dict[str, int]:
    """File descriptors of the namespaces of `pid` that are not the caller's own. AttachError unless the mount
    and pid namespaces are among them."""
    found: dict[str, int] = {}
    try:
        for kind in _KINDS:
            try:
                fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # a kernel without this kind, or no such process
                if kind in _ESSENTIAL:
                    raise
                continue
            theirs, ours = os.fstat(fd), os.stat(f"/proc/self/ns/{kind}")
            if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
                os.close(fd)
            else:
                found[kind] = fd
    except OSError as error:
        close(found)
        raise AttachError(f"{os.strerror(error.errno or 0)} - Failed to get init pid") from None
    if missing := [kind for kind in _ESSENTIAL if kind not in found]:
        close(found)
        raise AttachError(f"Operation not permitted - Process {pid} has no {missing[0]} namespace of its own")
    return found


def close(namespaces: dict[str, int]) -> None:
    for fd in namespaces.values():
        os.close(fd)


def join(namespaces: dict[str, int], *kinds: str) -> None:
    """Join those of `kinds` that differ from ours, in the order given. Raises OSError."""
    for kind in kinds:
        if kind in namespaces:
            setns(namespaces[kind], _KINDS[kind])


def join_all(namespaces: dict[str, int]) -> None:
    """Join everything that lxc-attach joins. Children, not the caller, are in the pid namespace.
    AttachError."""
    try:
        join(namespaces, *_KINDS)
    except OSError as error:
        raise AttachError(f"{os.strerror(error.errno or 0)} - Failed to enter namespace") from None


def become_root() -> None:
    """Be uid and gid 0 of the namespace just joined, without further groups (a namespace may forbid dropping
    them)."""
    try:
        os.setgroups([])
    except PermissionError:
        pass
    os.setgid(0)
    os.setuid(0)


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat: with the pid it identifies a process. None when there is no living one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


if hasattr(os, "setns"):
    setns = os.setns
else:  # Python 3.11

    def setns(fd: int, nstype: int = 0) -> None:
        """setns(2). Raises OSError."""
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(ctypes.c_int(fd), ctypes.c_int(nstype)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
