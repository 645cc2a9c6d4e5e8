"""One holder at a time, by a lock on a file: the kernel frees it with its holder, so it is never stale."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

from .. import AgentError

POLL_S = 0.05


@contextmanager
def exclusive(
    path: str, wait_s: float, what: str, on_wait: Optional[Callable[[str], None]] = None
) -> Iterator[None]:
    """Hold `path`, which says who holds it. `on_wait` is told that once, when it is somebody else.

    Raises AgentError (locked, with `what`) when the wait is over, OSError where the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        until = time.monotonic() + wait_s
        while not _try(descriptor):
            holder = os.pread(descriptor, 100, 0).decode("ascii", "replace").strip() or "unknown"
            if time.monotonic() >= until:
                what = "%s for more than %.0f s (%s)" % (what, wait_s, holder)
                raise AgentError("locked", what, path, "wait for it, or look at that process")
            if on_wait is not None:
                on_wait(holder)
                on_wait = None
            time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"pid %d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
