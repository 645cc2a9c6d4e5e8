"""The lock of a code root: one deploy at a time verifies, switches and prunes. The kernel frees it with its
holder, so it can never be stale; the file says who holds it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from types import TracebackType
from typing import Any, Dict, Optional, Type

from . import AgentError

POLL_S = 0.1


class DeployLock:
    """Context manager. Raises AgentError("locked") naming the holder when it is not free within `wait_s`."""

    def __init__(self, code_root: str, who: str, what: str, wait_s: float = 0.0) -> None:
        self._path = os.path.join(code_root, ".lock")
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
                    raise _locked(self._path) from None
                time.sleep(POLL_S)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(self._holder).encode(), 0)
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


def holder(code_root: str) -> Optional[Dict[str, Any]]:
    """Who deploys right now: who, what, at, pid; None when nobody does."""
    path = os.path.join(code_root, ".lock")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(path)
    finally:
        os.close(descriptor)
    return None


def _read(path: str) -> Dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):  # held, but its holder has not written yet
        value = None
    return value if isinstance(value, dict) else {}


def _locked(path: str) -> AgentError:
    found = _read(path)
    who = "%s (%s)" % (found["who"], found["what"]) if found.get("who") else "another deploy"
    since = ""
    if isinstance(found.get("at"), (int, float)):
        since = " since %.0f s ago" % max(time.time() - found["at"], 0)
    what = "%s is deploying here%s" % (who, since)
    return AgentError("locked", what, path, "wait a moment, or deploy with --wait 60")
