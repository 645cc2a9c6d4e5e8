"""Ending a first process: exactly that one, and waited for. Standard library only; for `python -I -S` too."""

from __future__ import annotations

import signal
import time

from dflashctl.agent.processes import proc
from dflashctl.agent.processes.signals import send_signal

LONGEST_LOOK_S = 0.02


def gone(identity: proc.Identity, timeout_s: float) -> bool:
    """Whether the process ends in that time. Of a pid namespace's first process that means: all others of it
    have ended before (pid_namespaces(7))."""
    end = time.monotonic() + timeout_s
    pause = 0.001
    while proc.living(identity) is not None:
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_LOOK_S)
    return True


def kill(identity: proc.Identity, deadline_s: float) -> bool:
    """SIGKILL, and wait. False: it hangs in the kernel."""
    send_signal(identity, signal.SIGKILL)
    return gone(identity, deadline_s)
