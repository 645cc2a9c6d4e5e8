"""Signals to verified processes, and to nobody else."""

from __future__ import annotations

import os
import signal

from . import proc


def send_signal(identity: proc.Identity, number: int) -> bool:
    """Signal exactly this process. False: it is gone already (or another one has its pid).

    With pidfd (Linux 5.3, Python 3.9) the pid cannot be given out again between check and signal; elsewhere
    the check comes directly before the signal. Raises PermissionError. Never signals a group, pid 0, pid 1
    or the caller.
    """
    pid = identity[0]
    if pid <= 1 or pid == os.getpid():
        raise ValueError("refusing to signal pid %d" % pid)
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return _check_then_kill(identity, number)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # an old kernel, or a seccomp filter that does not know the call
        return _check_then_kill(identity, number)
    try:
        if proc.living(identity) is None:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def tell_to_end(identity: proc.Identity, number: int) -> bool:
    """SIGTERM or SIGKILL, as `send_signal` sends it; after SIGTERM SIGCONT, for who is stopped by a signal
    does not hear it otherwise.
    """
    reached = send_signal(identity, number)
    if reached and number == signal.SIGTERM:
        send_signal(identity, signal.SIGCONT)
    return reached


def _check_then_kill(identity: proc.Identity, number: int) -> bool:
    if proc.living(identity) is None:
        return False
    try:
        os.kill(identity[0], number)
    except ProcessLookupError:
        return False
    return True
