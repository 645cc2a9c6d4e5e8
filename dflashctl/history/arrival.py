"""Files on their way home: hashed while they come, resumed where they broke off, over as many connections as
it takes.

Its bytes come as they are: `pct exec` without a terminal changes none. Each answer proves that first, by a
sample of all bytes, and the sha256 decides in the end. Where something on the way does change them, they come
as base64, more slowly.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dflashctl.agent.history.pull import SAMPLE
from dflashctl.config.hosts import Host
from dflashctl.errors import Unreachable, VerificationFailed
from dflashctl.remote.again import let_go, pause_s
from dflashctl.remote.agent_call import Event, call
from dflashctl.remote.engine import Engine
from dflashctl.runs.facts import text, whole

FILE_TIMEOUT_S = 3600.0
TRIES = 6
"""In a row without a byte of progress."""

TELL_BYTES = 1 << 20
READ_BYTES = 1 << 20

log = logging.getLogger("dflashctl.pull")


class Changed(Exception):
    """Bytes do not arrive as they were sent."""


class Line:
    """An engine that is opened anew after it broke. `raw`: bytes arrive there as they are sent, as far as is
    known."""

    def __init__(self, host: Host, connect: Callable[[Host], Engine], sleep: Callable[[float], None]) -> None:
        self.host = host
        self.raw = True
        self._connect = connect
        self._sleep = sleep
        self._engine: Engine | None = None

    def call(
        self,
        op: str,
        request: dict[str, Any],
        on_event: Callable[[Event], None],
        on_data: Callable[[bytes], None] | None = None,
    ) -> dict[str, Any]:
        self._engine = self._engine or self._connect(self.host)
        return call(self._engine, op, request, timeout_s=FILE_TIMEOUT_S, on_event=on_event, on_data=on_data)

    def broken(self, failures: int) -> None:
        self.close()
        self._sleep(pause_s(failures))

    def close(self) -> None:
        let_go(self._engine)
        self._engine = None


class Arrival:
    """What is here of a file: `at` bytes in its part, and their sha256. Of this file alone: see `alone`."""

    def __init__(self, path: str, file: BinaryIO, told: Callable[[int, int], None]) -> None:
        self.path = path
        self.end: dict[str, Any] | None = None
        """What was said at its end."""
        self.at = 0
        self.received = 0
        """Bytes that came over the line, also those of an earlier beginning."""
        self._file = file
        self._told = told
        self._told_at = 0
        self._size = 0
        self._identity = ""
        self._raw = False
        self._digest = hashlib.sha256()
        file.seek(0)
        while data := file.read(READ_BYTES):
            self._digest.update(data)
            self.at += len(data)

    def asked(self) -> dict[str, Any]:
        """The rest, please."""
        prefix = self._digest.hexdigest() if self.at else ""
        return {"path": self.path, "offset": self.at, "prefix_sha256": prefix}

    def begin(self, start: int | None, size: int | None, identity: str) -> None:
        """Bytes come from `start` on. Raises Changed where those that are here came as they are and are not
        those of the file: the same file, not one that took its place."""
        changed = False
        if start == 0 and self.at:
            changed = self._raw and identity == self._identity
            self.restart()
        if changed or start != self.at or size is None:
            raise Changed
        self._size, self._identity = size, identity

    def restart(self) -> None:
        """What is here is not the file's."""
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.at = self._told_at = 0
        self._raw = False

    def write(self, data: bytes, *, raw: bool) -> None:
        """Raises Changed for more than the file has."""
        if self.at + len(data) > self._size:
            raise Changed
        self._raw = self._raw or raw
        self._file.write(data)
        self._digest.update(data)
        self.at += len(data)
        self.received += len(data)
        if self.at - self._told_at >= TELL_BYTES:
            self._told_at = self.at
            self._told(self.at, self._size)

    def finish(self, end: dict[str, Any]) -> None:
        """Raises Changed where what is here is not what was sent."""
        self._file.flush()
        if "sha256" in end:
            written = os.fstat(self._file.fileno()).st_size  # more where another program writes here, too
            if (end["sha256"], end.get("size"), written) != (self._digest.hexdigest(), self.at, self.at):
                self.restart()
                raise Changed
            self._told(self.at, self._size)
        self.end = end


class Receiver:
    """One answer to `pull_files`, given to the arrivals that it is about. Every method raises Changed."""

    def __init__(self, arrivals: Sequence[Arrival], raw: bool, ended: Callable[[Arrival], None]) -> None:
        self._arrivals = arrivals
        self._ended = ended
        self._current: Arrival | None = None
        self._sample: bytes | None = b"" if raw else None

    def event(self, event: Event) -> None:
        if "file" in event:
            self._current = self._named(event["file"])
            self._current.begin(whole(event.get("from")), whole(event.get("size")), text(event.get("as")))
        if "data" in event:
            try:
                self._write(base64.b64decode(text(event["data"]), validate=True), raw=False)
            except ValueError:
                raise Changed from None
        if "end" in event:
            arrival = self._named(event["end"])
            arrival.finish(event)
            self._ended(arrival)

    def data(self, piece: bytes) -> None:
        """The sample at the beginning is proven before a byte is kept."""
        if self._sample is not None:
            missing = len(SAMPLE) - len(self._sample)
            self._sample, piece = self._sample + piece[:missing], piece[missing:]
            if not SAMPLE.startswith(self._sample):
                raise Changed
            if len(self._sample) < len(SAMPLE):
                return
            self._sample = None
        if piece:
            self._write(piece, raw=True)

    def _write(self, data: bytes, *, raw: bool) -> None:
        if self._current is None:
            raise Changed
        self._current.write(data, raw=raw)

    def _named(self, value: object) -> Arrival:
        at = whole(value)
        if at is None or not 0 <= at < len(self._arrivals) or self._arrivals[at].end is not None:
            raise Changed
        return self._arrivals[at]


def fetch(
    line: Line, request: dict[str, Any], arrivals: Sequence[Arrival], ended: Callable[[Arrival], None]
) -> None:
    """All bytes of the files, over as many connections as it takes; `ended` is called with each when it is
    whole, or has been refused over there. Raises Unreachable; VerificationFailed (bytes are changed even as
    base64)."""
    failures = 0
    while left := [each for each in arrivals if each.end is None]:
        before = _progress(arrivals)
        receiver = Receiver(left, line.raw, ended)
        asked = {"raw": line.raw, "files": [each.asked() for each in left]}
        try:
            line.call("pull_files", request | asked, receiver.event, receiver.data)
            if any(each.end is None for each in left):
                raise Changed
        except Changed:
            if not line.raw:
                path = next(each.path for each in left if each.end is None)
                raise VerificationFailed(
                    f"{path} arrived different from what it is there",
                    where=line.host.name,
                    next="run it again",
                ) from None
            _no_longer_raw(line)
        except Unreachable:
            failures = 0 if _progress(arrivals) > before else failures + 1
            if failures >= TRIES:
                raise
            line.broken(failures)


def _progress(arrivals: Sequence[Arrival]) -> tuple[int, int]:
    return sum(each.end is not None for each in arrivals), sum(each.at for each in arrivals)


def compare(line: Line, request: dict[str, Any], here: Mapping[str, tuple[int, str]]) -> set[str]:
    """Which of the files here (path: size and sha256) have the bytes of those over there."""
    if not here:
        return set()
    paths, ends = list(here), dict[int, bool]()

    def listen(event: Event) -> None:
        if "end" in event:
            at = whole(event["end"])
            if at is not None and 0 <= at < len(paths):
                ends[at] = event.get("sha256") == here[paths[at]][1]

    files = [
        {"path": path, "offset": size, "prefix_sha256": digest, "compare": True}
        for path, (size, digest) in here.items()
    ]
    failures = 0
    while True:
        try:
            line.call("pull_files", request | {"files": files}, listen)
            return {paths[at] for at, same in ends.items() if same}
        except Unreachable:
            failures += 1
            if failures >= TRIES:
                raise
            line.broken(failures)


def _no_longer_raw(line: Line) -> None:
    log.debug("%s: bytes do not arrive as they are sent; asking for base64", line.host.name)
    line.raw = False
    line.close()


@contextlib.contextmanager
def alone(part: Path) -> Iterator[BinaryIO | None]:
    """The part, opened for appending and for us alone; None while another pull is at work on it. Raises
    OSError."""
    with part.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError:  # a file system without locks
            pass
        try:  # another pull may have ended, and renamed it, between the opening and the lock
            mine = os.path.samestat(os.fstat(file.fileno()), part.stat())
        except FileNotFoundError:
            mine = False
        try:
            yield file if mine else None
        finally:
            if mine and file.tell() == 0:  # nothing came, or an empty file that stands in its place now
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), part.stat()):
                        part.unlink()
