"""Writing the small files of a run, and its log: whole or not at all, and by a full disk neither ended nor
silenced.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from trainer.errors import ConfigError, TrainerError

VERSION = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ROOM = "make room there (df -h, df -i)"
UNUSABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
UNHEARD = (errno.EPIPE, errno.EIO)
RESERVED = 1 << 16  # bytes: a traceback, several times over


def write_json(path: Path, value: dict[str, Any], to_disk: bool = True) -> None:
    """Replace the file: all of it or nothing; `to_disk`: also when the machine goes down right after it."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump({**value, "version": VERSION}, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            if to_disk:
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def append_line(path: Path, value: dict[str, Any]) -> None:
    """One write of one line: the supervisor appends to events.jsonl too. A line before it that a full disk
    or a kill cut short is ended first, or this one would be lost with it.
    """
    line = json.dumps({"version": VERSION, **value}).encode() + b"\n"
    with path.open("a+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[file.write(line) or 0 :]


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on disk, also when the machine goes down right after it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path) -> int:
    """A descriptor that holds the run folder's file `path` locked until it is closed.

    Raises:
        ConfigError: another process holds it. OSError: it cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            "another process trains in this folder",
            where=str(path.parent),
            next="let it end, or name another folder in DFLASH_RUN_DIR",
        ) from None
    except OSError:  # no locks on this file system: then nobody can have it
        pass
    return descriptor


def stamp(path: Path) -> tuple[int, int] | None:
    """Which file it is, None: there is none. One that is written anew is another."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def make_folder(path: Path) -> None:
    """The folder, with those above it; it may be there already.

    Raises:
        TrainerError: something else has its name, or a folder cannot be made there at all (/proc, a link that
            leads nowhere). OSError: the disk is full, or this person may not.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError) as error:
        raise _unusable(error) from error


def of_the_disk(error: BaseException) -> TrainerError | None:
    """What to say of an error that is no bug: a full disk, or a place that this person cannot use; None of
    any other. A file that is not there is none of these: it may be one of ours that a bug lost.
    """
    if not isinstance(error, OSError) or error.errno not in (*FULL, *UNUSABLE):
        return None
    if error.errno not in FULL:
        return _unusable(error)
    return TrainerError(f"cannot write: {error.strerror}", where=_place(error), next=ROOM)


def _unusable(error: OSError) -> TrainerError:
    hint = "see whose it is (ls -ld), or name another place"
    return TrainerError(f"cannot be used: {error.strerror}", where=_place(error), next=hint)


def _place(error: OSError) -> str:
    return str(Path(os.fsdecode(error.filename)).absolute()) if error.filename else ""


class Reserve:
    """Room on the disk of a folder for a process's last words. It lies in a file without a name, so it goes
    with the process, however that ends.
    """

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] | None = None
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            self._file.write(os.urandom(RESERVED))  # not zeros, which some disks do not store
        except OSError:
            self._release()  # full already: there is nothing to hold

    def write_json(self, path: Path, value: dict[str, Any]) -> None:
        """`write_json`, in the room that was kept if there is no other."""
        try:
            write_json(path, value)
        except OSError:
            self._release()
            write_json(path, value)

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def to_log(text: str) -> None:
    """Past Python's buffers, for a process that is about to end: a full disk is no reason not to."""
    with suppress(OSError):
        os.write(2, text.encode())


class _Losing(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as problem:
            if problem.errno not in (*FULL, *UNHEARD):
                raise
            written = None
        return len(data) if written is None else written  # None: it does not block, and is full


def lose_lines_that_cannot_be_told() -> None:
    """From now on, what is printed into a log file on a full disk, a terminal that has closed or a pipe that
    nobody reads is lost, and raises nothing: hours of training are not to end with who looked on.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            raw = _Losing(stream.fileno(), "wb", closefd=False)
            stream.flush()
        except (OSError, ValueError):  # closed, or in memory
            continue
        text = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, text)
