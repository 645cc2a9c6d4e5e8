"""The lock of a code root: one deploy at a time verifies, switches and prunes. The kernel frees it with its
holder, so it can never be stale; the file says who holds it."""

from __future__ import annotations

import fcntl
import os
import time
from types import TracebackType
from typing import Optional, Type

from .. import AgentError
from . import lockrecord

NAME = ".lock"
POLL_S = 0.1


class DeployLock:
    """Context manager. Raises AgentError("locked") naming the holder when it is not free within `wait_s`."""

    def __init__(self, code_root: str, who: str, what: str, wait_s: float = 0.0) -> None:
        self._path = os.path.join(code_root, NAME)
        self._holder = {"who": who, "what": what, "at": time.time(), "pid": os.getpid()}
        self._wait_s = wait_s
        self._descriptor = -1

    def __enter__(self) -> "DeployLock":
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(self._descriptor)
                    found = lockrecord.read(self._path) or {}
                    hint = "wait a moment, or deploy with --wait 60"
                    raise AgentError("locked", lockrecord.held_words(found), self._path, hint) from None
                time.sleep(POLL_S)
        lockrecord.write(self._descriptor, self._holder)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
        finally:
            os.close(self._descriptor)


def holder(code_root: str) -> Optional[lockrecord.Record]:
    """Who deploys right now; None when nobody does."""
    return lockrecord.holder(os.path.join(code_root, NAME))
