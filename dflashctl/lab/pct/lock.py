"""The lock that push, pull and the power commands hold: one flock a container (docs/pct.md#lock)."""

from __future__ import annotations

import fcntl
import os
import signal

from dflashctl.lab.pct.errors import Die
from dflashctl.lab.pct.output import err

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

WAIT_S = 10.0


class _TooLong(Exception):
    pass


def acquire(lock_dir: str, vmid: int) -> int:
    """Take the container's lock and return the file descriptor that holds it, until it is closed.

    Waits 10 s, then Die with exit code 4. Messages name the real host's path wherever the file lies.
    """
    os.makedirs(lock_dir, exist_ok=True)
    name = f"pve-config-{vmid}.lock"
    fd = os.open(os.path.join(lock_dir, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        err("trying to acquire lock...\n")

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except _TooLong:
        raise Die(f"can't lock file '/run/lock/lxc/{name}' - got timeout\n", 4) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    err(" OK\n")
    return fd
