"""Freezing containers that are plain namespaces, which have no cgroup of their own: every process is stopped
by a signal, and a marker makes later ones stop before their command starts. `lxc-freeze` is the bed's
equivalent. outside.py is the command of either.
"""

from __future__ import annotations

import os
import signal
import time

from dflashctl.lab.pct.errors import Die

DEADLINE_S = 10.0


def freeze(folder: str, vmid: int, init_pid: int) -> None:
    """Mark the container frozen and stop all its processes. Die if some cannot be stopped within 10 s."""
    if _namespace(init_pid) == _namespace(os.getpid()):
        raise Die(f"CT {vmid} has no pid namespace of its own: nothing is frozen\n")
    with open(_marker(folder, vmid), "w", encoding="ascii"):
        pass
    end = time.monotonic() + DEADLINE_S
    while True:
        moving = [pid for pid in processes(init_pid) if _status(pid) not in ("T", "t", "Z", "X", "")]
        if not moving:
            return
        if time.monotonic() > end:
            raise Die(f"failed to freeze CT {vmid}: processes {moving} do not stop\n")
        for pid in moving:
            _signal(pid, signal.SIGSTOP)
        time.sleep(0.01)


def thaw(folder: str, vmid: int, init_pid: int) -> None:
    """Let the container's processes go on."""
    forget(folder, vmid)
    for pid in processes(init_pid):
        _signal(pid, signal.SIGCONT)


def is_frozen(folder: str, vmid: int) -> bool:
    return os.path.exists(_marker(folder, vmid))


def forget(folder: str, vmid: int) -> None:
    try:
        os.unlink(_marker(folder, vmid))
    except FileNotFoundError:
        pass


def hold() -> None:
    """Stop the calling process until the container is thawed."""
    os.kill(os.getpid(), signal.SIGSTOP)


def processes(init_pid: int) -> list[int]:
    """All processes whose pid namespace is the container's, as the caller counts them."""
    wanted = _namespace(init_pid)
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _namespace(int(name)) == wanted]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return f"none of {pid}"


def _status(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _marker(folder: str, vmid: int) -> str:
    return os.path.join(folder, "ns", f"{vmid}.frozen")
