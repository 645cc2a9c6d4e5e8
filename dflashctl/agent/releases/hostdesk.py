"""What the host does for a deploy, in one remote command: lock, take archives, push them inside, clean up.

The caller keeps talking to it on stdin, after the request (everything else comes back as events):

    {"do": "deliver", "size": n, "to": "/root/dflash/.incoming-x.tar", "mode": 384}
                      and then, once {"ready"} is said, n bytes; answered by {"delivered", "exit", "said"}
    (an empty line)   a sign of life, at least every talk.SILENCE_S / 3
    {"do": "done"}    all went well: nothing needs to be removed inside

When stdin ends without "done", or is silent for too long, the caller is gone: what was delivered is removed
inside again, the staging folder is removed, the lock is freed. A desk that is killed outright leaves a folder
that the next one sweeps, and a lock that the kernel has freed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

from .. import AgentError
from ..records.talk import CallerGone, Talk
from .hostlock import Broken, HostLock, lock_folder, lock_path
from .pctlock import holder_words

SPARE_BYTES = 16 << 20
SPARE_INODES = 16
"""Left free on the host: a full root file system stops more than a deploy."""

STAGING_PATTERN = re.compile(r"dflashctl-deploy-[0-9a-f]{32}")
LOCK_TIMEOUT = re.compile(r"can't lock file '(?P<file>[^']*)' - got timeout")
LOCK_NOTICE = re.compile(r"^trying to acquire lock\.\.\.\s*(?:OK\s*$)?", re.MULTILINE)
LOCK_PATIENCE_S = 60.0
"""pct itself waits 10 s for the container's configuration lock; a backup or a start can hold it longer."""

SLOWEST_BYTES_PER_S = 256 * 1024
REMOVE_S = 8.0

Request = Dict[str, Any]


def host_desk(request: Request, emit: Any) -> Dict[str, Any]:
    """Serve one deploy until its caller says that it is done, or is gone.

    request: container|null (null: this machine itself), code_root, staging_dir, wait_s, and for the lock's
    record who, what, host. Events: {"waiting": holder}, {"held": true, "free_bytes", "free_inodes"},
    {"ready"}, {"delivered", "exit", "said"}, {"phase": text}. Answers {"done": bool, "held_s": seconds}.
    Raises AgentError: locked, verification (no space on the host), unreachable (the caller is gone).
    """
    record = {key: request.get(key) for key in ("who", "what", "host", "container", "code_root")}
    lock = HostLock(
        lock_path(request.get("container"), request["code_root"]),
        record,
        float(request.get("wait_s") or 0),
        lambda found: _say_waiting(emit, found),
    )
    started = time.monotonic()
    with lock:
        desk = Desk(request, emit)
        try:
            desk.serve(Talk())
        except CallerGone as gone:
            desk.take_back()
            raise AgentError("unreachable", "%s; the lock is free again" % gone) from None
        except Broken:
            desk.take_back()
            what = "the deploy lock was broken by %s; nothing was switched after that" % lock.broken_by()
            raise AgentError("locked", what, next="talk to them, then deploy again") from None
        except BaseException:
            desk.take_back()
            raise
        finally:
            desk.close()
    return {"done": True, "held_s": time.monotonic() - started}


def _say_waiting(emit: Any, found: Dict[str, Any]) -> None:
    emit({"waiting": found})
    if getattr(emit, "gone", False):
        raise AgentError("unreachable", "the caller is gone; it waits no longer")


class Desk:
    """Staging, delivering, taking back."""

    def __init__(self, request: Request, emit: Any) -> None:
        self._container: Optional[int] = request.get("container")
        self._parent = str(request["staging_dir"])
        self._emit = emit
        self._staging: Optional[str] = None
        self._staging_lock = -1
        self._delivered: List[str] = []

    def serve(self, talk: Talk) -> None:
        """Orders until "done"."""
        self._emit({"held": True})
        while True:
            order = talk.order()
            if order.get("do") == "done":
                return
            if order.get("do") != "deliver":
                raise AgentError("bug", "no such order: %r" % order)
            self._deliver(talk, str(order["to"]), int(order["size"]), int(order["mode"]))

    def _deliver(self, talk: Talk, to: str, size: int, mode: int) -> None:
        if self._container is None:
            self._delivered.append(to)
            self._receive(talk, to, size, mode)
            self._emit({"delivered": to, "exit": 0, "said": ""})
            return
        staged = os.path.join(self._make_staging(), "archive")
        self._check_space(size)
        self._receive(talk, staged, size, 0o600)
        self._delivered.append(to)
        self._emit({"phase": "pushing into the container"})
        code, said = self._push(staged, to, size, mode)
        os.unlink(staged)
        self._emit({"delivered": to, "exit": code, "said": said})

    def _receive(self, talk: Talk, path: str, size: int, mode: int) -> None:
        self._emit({"ready": True})
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, mode)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                os.fchmod(file.fileno(), mode)
                for data in talk.bytes(size):
                    while data:
                        data = data[file.write(data) :]
        except OSError as error:
            raise self._cannot_stage(error, os.path.dirname(path)) from error

    def _cannot_stage(self, error: OSError, folder: str) -> AgentError:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space there, or name another folder as staging_dir in hosts.yaml"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT):
            hint = "name a folder that can be written as staging_dir in hosts.yaml"
        reason = os.strerror(error.errno) if error.errno else str(error)
        side = "" if self._container is None else " on the host"
        return AgentError("verification", "%s%s; nothing switched" % (reason, side), folder, hint)

    def _check_space(self, size: int) -> None:
        space = os.statvfs(self._parent)
        free = space.f_bavail * space.f_frsize
        if size + SPARE_BYTES > free:
            what = "not enough space on the host: the archive needs %d MB, %d MB are free; nothing was sent"
            raise AgentError(
                "verification",
                what % ((size + SPARE_BYTES) // 1_000_000 + 1, free // 1_000_000),
                self._parent,
                "free some space there, or name another folder as staging_dir in hosts.yaml",
            )
        if space.f_files and space.f_favail < SPARE_INODES:
            what = "not enough inodes on the host: %d are free; nothing was sent" % space.f_favail
            raise AgentError("verification", what, self._parent, "remove small files there")

    def _make_staging(self) -> str:
        if self._staging is None:
            try:
                with _one_at_a_time():
                    sweep(self._parent)
                    folder = os.path.join(self._parent, "dflashctl-deploy-" + os.urandom(16).hex())
                    os.mkdir(folder, 0o700)
                    self._staging = folder
                    self._staging_lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    fcntl.flock(self._staging_lock, fcntl.LOCK_EX)
            except OSError as error:
                raise self._cannot_stage(error, self._parent) from error
        return self._staging

    def _push(self, staged: str, to: str, size: int, mode: int) -> "tuple[int, str]":
        """(exit code, pct's words). Tries again while another pct command holds the container's lock."""
        argv = ["pct", "push", str(self._container), staged, to, "--perms", "%04o" % mode]
        give_up = time.monotonic() + LOCK_PATIENCE_S
        while True:
            code, said = _run(argv, 60.0 + size / SLOWEST_BYTES_PER_S)
            waited = LOCK_TIMEOUT.search(said)
            if code == 0 or waited is None:
                return code, LOCK_NOTICE.sub("", said).strip()
            who = holder_words(waited.group("file"))
            if time.monotonic() >= give_up:
                what = "container %s is locked by another pct command (%s)" % (self._container, who)
                raise AgentError(
                    "locked", what, waited.group("file"), "wait until it has ended, then deploy again"
                )
            self._emit({"phase": "waiting for the container's lock, held by " + who})

    def take_back(self) -> None:
        """Remove inside what was delivered for a deploy that does not go on."""
        while self._delivered:
            path = self._delivered.pop()
            if self._container is None:
                _unlink(path)
                continue
            try:
                _run(["pct", "exec", str(self._container), "--", "rm", "-f", "--", path], REMOVE_S)
            except AgentError:
                pass  # frozen or gone; the next deploy sweeps it

    def close(self) -> None:
        """Remove the staging folder."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            os.close(self._staging_lock)
            self._staging = None


def _run(argv: List[str], timeout_s: float) -> "tuple[int, str]":
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            cwd="/",
            env=dict(os.environ, LC_ALL="C.UTF-8"),
        )
    except subprocess.TimeoutExpired:
        what = "%s did not end within %.0f s" % (" ".join(argv[:3]), timeout_s)
        raise AgentError("unreachable", what, next="look at the container, then deploy again") from None
    except FileNotFoundError:
        raise AgentError(
            "usage", "%s: command not found" % argv[0], next="is this the Proxmox host?"
        ) from None
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """A new staging folder is not yet locked for a moment; nobody sweeps in that moment."""
    path = os.path.join(lock_folder(), "staging")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sweep(parent: str) -> None:
    """Remove our own staging folders that no desk holds any more."""
    for name in os.listdir(parent):
        if not STAGING_PATTERN.fullmatch(name):
            continue
        path = os.path.join(parent, name)
        try:
            if os.lstat(path).st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
