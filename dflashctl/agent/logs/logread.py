"""Operation `read_log`: a run's log from a byte on, followed for a while, across rotation and truncation.

Request
    state_dir, tag | id   as for `observe`; neither: the only live run, else the newest
    lines                 start with so many last lines (0: all of this run's part)
    since_s               start with what was written in the last so many seconds (see logindex.py)
    offset, inode         or go on where an earlier answer ended
    tail                  {"bytes", "crc32"} of what the caller last got before `offset`: when the file has
                          something else there, it was cut and has grown past that point again
    wait_s                follow so long (0: what is there now); ends earlier when the run has ended
    max_bytes             end after so much, to be asked again: one answer must not grow for ever

Progress events
    {"run": {"id", "tag", "path", "live", "secrets" [names]}} once, first
    {"data": base64, "inode", "offset": of the byte behind} in order, no byte twice
    {"notice": "rotated" | "truncated", "inode", "offset": 0}    what follows is from there
    {"notice": "missing" | "no_index": `since_s` could not be obeyed}

Answer: {"id", "inode", "offset", "size", "live", "done": nothing more will come}.
"""

from __future__ import annotations

import base64
import os
import time
import zlib
from typing import Any, BinaryIO, Dict, Optional

from .. import AgentError
from ..records.pick import one_run
from ..records.runfolder import RunFolder
from . import logindex
from .ownlog import is_open_log, log_file

CHUNK_BYTES = 192 * 2**10
TAIL_BYTES = 1024
MAX_BYTES = 16 * 2**20
POLL_S = 0.2
WAIT_LIMIT_S = 300.0


def read_log(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text. Raises AgentError("not_found") for a run or a log that is not there."""
    run = one_run(request)
    record = run.record().value
    if record is None or not record.get("log"):
        raise AgentError(
            "not_found", "run %s has no readable record, so its log is not known" % run.id, run.path
        )
    live = _live(run)
    path = log_file(run, record)
    secrets = record.get("secrets") or []
    emit({"run": {"id": run.id, "tag": record.get("tag"), "path": path, "live": live, "secrets": secrets}})
    reader = Reader(run, record, emit, int(request.get("max_bytes") or MAX_BYTES))
    if request.get("offset") is not None:
        reader.go_on(int(request.get("inode") or 0), int(request["offset"]), request.get("tail") or {})
    else:
        reader.begin(int(request.get("lines") or 0), request.get("since_s"))
    until = time.monotonic() + min(max(float(request.get("wait_s") or 0.0), 0.0), WAIT_LIMIT_S)
    done = False
    while True:
        # Asked before the read: what was written before the end is then read for certain.
        live = _live(run)
        full = reader.read_on()
        done = not live and not full
        if done or full or time.monotonic() >= until or getattr(emit, "gone", False):
            break
        time.sleep(POLL_S)
    reader.close()
    return {
        "id": run.id,
        "inode": reader.inode,
        "offset": reader.offset,
        "size": reader.size,
        "live": live,
        "done": done,
    }


def _live(run: RunFolder) -> bool:
    """May its log still grow?"""
    if run.has("exit.json"):
        return False
    return run.live() or (not run.has("supervisor.json") and run.has("record.json") and _young(run))


def _young(run: RunFolder) -> bool:
    try:
        return time.time() - os.stat(run.file("record.json")).st_mtime < 60.0
    except OSError:
        return False


class Reader:
    """A position in a log that is known by its inode, so a rename does not lose it."""

    def __init__(self, run: RunFolder, record: Dict[str, Any], emit: Any, max_bytes: int) -> None:
        self.run = run
        self.record = record
        self.emit = emit
        self.left = max_bytes
        self.file: Optional[BinaryIO] = None
        self.inode = 0
        self.offset = 0
        self.size = 0
        self.missing_said = False
        self.tail_bytes, self.tail_crc = 0, 0

    def begin(self, lines: int, since_s: Any = None) -> None:
        """Start at this run's part, at what it wrote since, or at the last `lines` lines of that."""
        self.offset = max(int(self.record.get("log_start") or 0), 0)
        if not self.open(log_file(self.run, self.record)):
            return
        assert self.file is not None
        size = os.fstat(self.file.fileno()).st_size
        self.offset = min(self.offset, size)
        if since_s is not None:
            offset = logindex.offset_at(self.run, self.inode, time.time() - float(since_s))
            if offset is None:
                self.emit({"notice": "no_index"})
            self.offset = min(max(self.offset, offset or 0), size)
        if lines > 0:
            self.offset = tail_start(self.file, self.offset, size, lines)

    def go_on(self, inode: int, offset: int, tail: Dict[str, Any]) -> None:
        """Continue in the file with this inode, wherever it was moved to within its folder."""
        path = log_file(self.run, self.record)
        self.offset = offset
        self.tail_bytes, self.tail_crc = int(tail.get("bytes") or 0), int(tail.get("crc32") or 0)
        if inode and _inode(path) != inode:
            moved = find_inode(os.path.dirname(self.run.log_path(self.record)), inode)
            if moved is not None:
                self.open(moved)
                return
            if os.path.exists(path):
                self.start_over("rotated", self.open(path))
                return
        self.open(path)

    def start_over(self, notice: str, opened: bool = True) -> None:
        """From the beginning of the open file. The notice carries the new place: a caller that loses contact
        before the first byte from there must not ask for the old one again."""
        self.offset = 0
        self.tail_bytes, self.tail_crc = 0, 0
        self.inode = self.inode if opened else 0
        self.emit({"notice": notice, "inode": self.inode, "offset": 0})

    def is_followed_by(self, path: str) -> bool:
        """Does the log go on in the new file there? Not while that is empty, and the program, which knows
        nothing of a new file, writes to the old one."""
        try:
            return os.stat(path).st_size > 0 or not is_open_log(self.run, self.inode)
        except OSError:
            return False

    def was_cut(self) -> bool:
        """Is what was read last no longer where it was? Also when the file has grown past it again."""
        assert self.file is not None
        if self.size < self.offset:
            return True
        there = os.pread(self.file.fileno(), self.tail_bytes, self.offset - self.tail_bytes)
        return zlib.crc32(there) != self.tail_crc

    def open(self, path: str) -> bool:
        self.close()
        try:
            self.file = open(path, "rb")  # noqa: SIM115 - kept open: a rename must not lose it
        except FileNotFoundError:
            if not self.missing_said:
                self.emit({"notice": "missing"})
                self.missing_said = True
            return False
        except OSError as error:
            raise AgentError("not_found", "cannot read the log: %s" % error, path) from None
        self.inode = os.fstat(self.file.fileno()).st_ino
        return True

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def read_on(self) -> bool:
        """Send what is there. True: the answer is full, and more may be there."""
        path = self.run.log_path(self.record)
        if self.file is None and not self.open(path):
            return False
        if self.drain():
            return True
        current = _inode(path)
        if current is not None and current != self.inode and self.is_followed_by(path):
            # The old file is read to its end. Its writer may still have it open for a moment: what it adds
            # between the two looks is read first.
            if self.drain():
                return True
            opened = self.open(path)
            self.start_over("rotated", opened)
            return opened and self.drain()
        return False

    def drain(self) -> bool:
        assert self.file is not None
        self.size = os.fstat(self.file.fileno()).st_size
        if self.was_cut():
            self.start_over("truncated")
        self.file.seek(self.offset)
        while self.left > 0:
            data = self.file.read(min(CHUNK_BYTES, self.left))
            if not data:
                return False
            self.offset += len(data)
            self.left -= len(data)
            self.tail_bytes = min(len(data), TAIL_BYTES)
            self.tail_crc = zlib.crc32(data[-TAIL_BYTES:])
            self.emit(
                {"data": base64.b64encode(data).decode("ascii"), "inode": self.inode, "offset": self.offset}
            )
            if getattr(self.emit, "gone", False):
                return False
        return True


def tail_start(file: BinaryIO, start: int, size: int, lines: int) -> int:
    """Where the last `lines` lines begin, not before `start`. A last line without its newline counts."""
    position, found = size, 0
    while position > start:
        step = min(CHUNK_BYTES, position - start)
        position -= step
        file.seek(position)
        data = file.read(step)
        end = len(data)
        while True:
            newline = data.rfind(b"\n", 0, end)
            if newline < 0:
                break
            if position + newline != size - 1:  # the newline that ends the last line begins none
                found += 1
                if found == lines:
                    return position + newline + 1
            end = newline
    return start


def find_inode(folder: str, inode: int) -> Optional[str]:
    """A file of this folder by its inode: where a rotation moved it."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.inode() == inode and entry.is_file(follow_symlinks=False):
                    return entry.path
    except OSError:
        pass
    return None


def _inode(path: str) -> Optional[int]:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
