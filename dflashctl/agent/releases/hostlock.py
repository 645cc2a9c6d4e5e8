"""The deploy lock on the host: one deploy at a time for each container and code root.

The lock is a flock on a file in a folder that only its owner can enter; the file says who holds it. The
kernel frees it with its holder, so it cannot be stale; its holder removes the file. To break a lock is to end
its holder, by verified identity.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import signal
import stat
import time
from types import TracebackType
from typing import Any, Callable, Dict, Optional, Type

from .. import AgentError
from ..processes import proc
from ..processes.signals import send_signal
from .lockrecord import Record, held_words, holder, read, write

POLL_S = 0.1
SAY_EVERY_S = 2.0
BREAK_TERM_S = 20.0
"""So long its holder may clean up; then it is killed."""
BREAK_KILL_S = 3.0


def folder_name() -> str:
    """Root's is /run/dflashctl; anybody else's is below the home."""
    # The account's home, not $HOME: whoever calls with another HOME must still meet the same lock.
    root = os.geteuid() == 0
    return "/run/dflashctl" if root else os.path.join(_own_home(), ".local/state/dflashctl/locks")


def lock_folder() -> str:
    """`folder_name`, made if needed, closed to everyone else.

    Raises AgentError("usage") when the name is taken by something that is not ours alone.
    """
    folder = folder_name()
    try:
        if os.geteuid() != 0:
            os.makedirs(os.path.dirname(folder), 0o700, exist_ok=True)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        info = os.lstat(folder)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise AgentError("usage", "is not a folder of ours; nothing was done", folder, "remove it")
        if stat.S_IMODE(info.st_mode) & 0o077:
            os.chmod(folder, 0o700)
    except OSError as error:
        raise AgentError("verification", "no place for the deploy lock: %s" % error, folder) from error
    return folder


def _own_home() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # an account that no list names
        return os.path.expanduser("~")


def lock_path(container: Optional[int], code_root: str) -> str:
    """The lock file of a code root; the same for everybody who deploys there through this host."""
    return os.path.join(lock_folder(), lock_name(container, code_root))


def lock_name(container: Optional[int], code_root: str) -> str:
    """The file's name alone, for who only looks and makes no folder."""
    place = "machine" if container is None else "ct%d" % container
    digest = hashlib.sha256(os.fsencode(os.path.normpath(code_root))).hexdigest()[:12]
    return "%s-%s.lock" % (place, digest)


class Broken(BaseException):
    """Somebody broke our lock; raised out of whatever we were doing."""


class HostLock:
    """Context manager. Raises AgentError("locked") naming the holder when the wait is over.

    While it is held, SIGTERM raises Broken in the main thread.
    """

    def __init__(self, path: str, record: Record, wait_s: float, on_wait: Callable[[Record], None]) -> None:
        self._path = path
        self._record = record
        self._wait_s = wait_s
        self._on_wait = on_wait
        self._descriptor = -1

    def __enter__(self) -> "HostLock":
        deadline = time.monotonic() + self._wait_s
        say_at = 0.0
        while not self._try():
            found = read(self._path) or {}
            if time.monotonic() >= deadline:
                raise AgentError("locked", held_words(found), self._path, _next_words(found))
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + SAY_EVERY_S
                self._on_wait(found)
            time.sleep(POLL_S)
        signal.signal(signal.SIGTERM, _on_term)
        body = dict(self._record, at=time.time(), **proc.as_json(proc.own_identity()))
        write(self._descriptor, body)
        return self

    def _try(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file between our open and our lock.
            if os.fstat(descriptor).st_ino == os.stat(self._path).st_ino:
                self._descriptor, descriptor = descriptor, -1
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return False

    def broken_by(self) -> str:
        """Who broke it, once Broken was raised."""
        return str((read(self._path) or {}).get("broken_by") or "somebody")

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        finally:
            os.close(self._descriptor)


def _on_term(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: cleaning up must not be cut short
    raise Broken()


def _next_words(record: Record) -> str:
    name = " -H %s" % record["host"] if record.get("host") else ""
    return "wait for it: --wait 60. To look: dflashctl lock show%s" % name


def lock_show(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: container|null, code_root. Answers {"path", "holder": {...}|null}."""
    path = lock_path(request.get("container"), request["code_root"])
    return {"path": path, "holder": holder(path)}


def lock_break(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """End the process that holds the lock; it removes what it staged. request: container|null, code_root, by,
    holder (as lock_show told it: this one and no other).

    Answers {"holder": {...}|null (nobody held it), "killed": it had to be}. Raises AgentError("locked") when
    the holder cannot be told for certain, is another one by now, or does not go.
    """
    path = lock_path(request.get("container"), request["code_root"])
    found = holder(path)
    if found is None:
        return {"holder": None, "killed": False}
    who = proc.as_identity(found)
    if who is None or proc.living(who) is None:
        raise AgentError("locked", "its holder cannot be told yet", path, "run it again in a moment")
    if who != proc.as_identity(request["holder"]):
        what = "that deploy has ended, and another one holds the lock: %s" % held_words(found)
        raise AgentError("locked", what, path, "dflashctl lock show")
    try:
        _note_breaker(path, found, str(request.get("by") or "somebody"))
    except FileNotFoundError:  # it has just gone by itself, and its file with it
        return {"holder": found, "killed": False}
    send_signal(who, signal.SIGTERM)
    killed = False
    if not _gone(who, BREAK_TERM_S):
        killed = send_signal(who, signal.SIGKILL)
        if not _gone(who, BREAK_KILL_S):
            raise AgentError("locked", "pid %d cannot be killed" % who[0], path, "look at it on the host")
    return {"holder": found, "killed": killed}


def _note_breaker(path: str, found: Record, by: str) -> None:
    body = {key: value for key, value in found.items() if key != "held_s"}
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        data = json.dumps(dict(body, broken_by=by)).encode()
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _gone(who: proc.Identity, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while proc.living(who) is not None:
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True
