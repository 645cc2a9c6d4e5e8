"""What a supervisor does to itself, and to the program between fork and exec."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, Dict

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
MAX_OPEN_FILES = 1 << 20


def detach() -> None:
    """Make this process the parent that a run needs: own session, subreaper, deaf to the connection's end.

    SIGCHLD and SIGTERM are blocked from here on: the supervisor waits for them.
    """
    try:
        os.setsid()
    except PermissionError:  # already a session leader: launch made it one
        pass
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would throw exit statuses away
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    os.umask(0o022)
    raise_open_files()


def raise_open_files() -> None:
    """`ulimit -n` as high as allowed: an ssh session's 1024 is too few for data loaders and sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        pass


def fresh_start() -> None:
    """In the program's process, before exec: signals as programs expect them, and an ordinary place in the
    queue of the OOM killer."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            if int(file.read()) < 0:  # inherited from an sshd that protects itself
                file.seek(0)
                file.write("0")
    except (OSError, ValueError):
        pass


def read_secrets() -> Dict[str, str]:
    """{name: value} from stdin, which then becomes /dev/null. Never written anywhere."""
    data = sys.stdin.buffer.read()
    _to_null(0)
    return {str(name): str(value) for name, value in json.loads(data or b"{}").items()}


def tell(word: Dict[str, Any]) -> None:
    """The one line that `launch` waits for; stdout then becomes /dev/null. Nobody listening is no reason to
    end a run."""
    try:
        os.write(1, json.dumps(word).encode() + b"\n")
    except OSError:
        pass
    _to_null(1)


def _to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)
