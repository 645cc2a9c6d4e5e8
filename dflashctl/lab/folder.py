"""The lab's folder on the laptop: made private, locked, cleaned. Only names that the lab itself uses are ever
removed, and only in a folder that the lab has marked as its own: DFLASHCTL_LAB_DIR may point anywhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflashctl.agent.processes import proc
from dflashctl.errors import DflashError, Locked, UsageError
from dflashctl.lab.refused import MOVE, NO_ROOM
from dflashctl.lab.state import LabPaths

LOCK_DEADLINE_S = 60.0
REMOVE_DEADLINE_S = 5.0
LOG_LIMIT_BYTES = 1 << 20

_FLOCK = "hhqqi0q"
"""struct flock of fcntl(2): type, whence, start, length, pid."""


@contextlib.contextmanager
def locked(paths: LabPaths, *, create: bool) -> Iterator[bool]:
    """One `lab up` or `lab down` at a time. Yields False when there is no lab's folder (and not `create`).

    The lock is also the mark that a folder is the lab's. It may be removed while we wait for it, with its
    folder: then we begin again. Raises UsageError for a folder that is not ours to use, Locked after a
    minute.
    """
    end = time.monotonic() + LOCK_DEADLINE_S
    while True:
        if not _prepare(paths, create=create):
            yield False
            return
        try:
            fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the folder went in this moment
            continue
        except OSError as error:
            raise trouble(paths, error) from None
        try:
            _flock(fd, paths, end)
            if _still_there(fd, paths.lock):
                yield True
                return
        finally:
            os.close(fd)


def _prepare(paths: LabPaths, *, create: bool) -> bool:
    root = paths.root
    try:
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        entries = [path.name for path in root.iterdir()]
        owner = root.stat().st_uid
    except FileNotFoundError:
        return False
    except OSError as error:
        raise trouble(paths, error) from None
    if owner != os.geteuid():
        raise UsageError(
            "the lab's folder belongs to somebody else",
            where=str(root),
            next="set DFLASHCTL_LAB_DIR to a folder of yours",
        )
    if paths.lock.name not in entries:
        if entries:
            raise UsageError(
                "this folder holds files that are not a lab's",
                where=str(root),
                next="set DFLASHCTL_LAB_DIR to a folder that is empty or does not exist yet",
            )
        if not create:
            return False
    if create:
        root.chmod(0o700)
    return True


def _flock(fd: int, paths: LabPaths, end: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise Locked(
                    "another `dflashctl lab up` or `lab down` is at work on this lab",
                    where=str(paths.root),
                    next="wait for it, or end it",
                ) from None
            time.sleep(0.05)


def _still_there(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def host_of(paths: LabPaths) -> proc.Identity | None:
    """The first process of the lab that uses this folder, by the lock that it holds on the log: also when the
    record is gone or damaged. None when there is none (or it lives in another pid namespace)."""
    try:
        with paths.log.open("rb") as log:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(log, fcntl.F_GETLK, asked))
    except OSError:
        return None
    found = proc.read_process(pid) if kind != fcntl.F_UNLCK and pid > 1 else None
    return None if found is None else found.identity


def clean(paths: LabPaths) -> bool:
    """Remove what a lab that is not up any more has left, but the containers' disks and the log, as a
    machine that starts again keeps its disks. False: there was nothing."""
    leftovers = [paths.record, paths.ssh, paths.host_root, paths.pct, paths.gpu, paths.etc, paths.bin]
    found = [path for path in leftovers if os.path.lexists(path)]
    for path in found:
        remove_tree(path)
    return bool(found)


def remove(paths: LabPaths) -> None:
    """Remove everything of the lab's; the folder too, when nothing else is in it."""
    for path in (paths.record, paths.ssh, paths.host_root, paths.node, paths.log):
        remove_tree(path)
    paths.lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        paths.root.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a file or a tree of ours, also folders whose modes forbid it, also while its last writer is
    ending."""
    end = time.monotonic() + REMOVE_DEADLINE_S
    while os.path.lexists(path):
        try:
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path, onerror=_open_and_retry)
        except FileNotFoundError:
            continue
        except OSError as error:
            if time.monotonic() > end:
                raise DflashError(
                    f"cannot remove a file of the lab: {error.strerror}", where=str(error.filename or path)
                ) from None
            time.sleep(0.05)


def _open_and_retry(action: Callable[..., Any], name: str, info: Any) -> None:
    """For rmtree: a program in the container may have taken rights from its own folders."""
    if isinstance(info[1], FileNotFoundError):
        return
    for folder in (Path(name).parent, Path(name)):
        if not folder.is_symlink() and folder.is_dir():
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode & 0o700 == 0o700:
                continue
            folder.chmod(mode | 0o700)
            if folder == Path(name):  # it could not be listed: now it can
                shutil.rmtree(folder, onerror=_open_and_retry)
                return
            action(name)
            return
    raise info[1]


def trim_log(paths: LabPaths) -> None:
    """Start the log afresh when it has grown; its end is all that anybody reads."""
    with contextlib.suppress(FileNotFoundError):
        if paths.log.stat().st_size > LOG_LIMIT_BYTES:
            paths.log.unlink()


def trouble(paths: LabPaths, error: OSError) -> DflashError:
    """The message for a file of the lab that cannot be written."""
    return UsageError(
        f"cannot write the lab's files: {error.strerror or error}",
        where=str(error.filename2 or error.filename or paths.root),  # of a copy: where it was to go
        next=MOVE if error.errno in NO_ROOM else "set DFLASHCTL_LAB_DIR to a folder of yours",
    )


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one."""
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(text)
    aside.replace(path)
