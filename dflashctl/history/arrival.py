"""One file on its way home: hashed while it comes, resumed where it broke off, over as many connections as it
takes.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dflashctl.agent.history.pull import SAMPLE
from dflashctl.config.hosts import Host
from dflashctl.errors import Unreachable
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

    def __init__(self, file: BinaryIO, told: Callable[[int], None]) -> None:
        self._file = file
        self._told = told
        self._digest = hashlib.sha256()
        self.at = 0
        self.received = 0
        """Bytes that came over the line, also those of an earlier beginning."""
        self._told_at = 0
        self._sample: bytes | None = None
        self._raw = False
        file.seek(0)
        while data := file.read(READ_BYTES):
            self._digest.update(data)
            self.at += len(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def begin(self, *, raw: bool) -> None:
        """A new answer comes, its bytes as they are or as base64."""
        self._sample = b"" if raw else None

    def restart(self) -> None:
        """What is here is not the file's."""
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.at = self._told_at = 0
        self._raw = False

    def event(self, event: Event) -> None:
        if "from" in event and whole(event.get("from")) == 0 and self.at:
            changed = self._raw
            self.restart()
            if changed:
                raise Changed
        if "data" in event:
            self._write(base64.b64decode(text(event["data"])))

    def data(self, piece: bytes) -> None:
        """Raises Changed where the sample at the beginning is not what was sent."""
        if self._sample is not None:
            missing = len(SAMPLE) - len(self._sample)
            self._sample, piece = self._sample + piece[:missing], piece[missing:]
            if not SAMPLE.startswith(self._sample):
                raise Changed
            if len(self._sample) < len(SAMPLE):
                return
            self._sample = None
        self._raw = True
        self._write(piece)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.at += len(data)
        self.received += len(data)
        if self.at - self._told_at >= TELL_BYTES:
            self._told_at = self.at
            self._told(self.at)


def fetch(line: Line, request: dict[str, Any], arrival: Arrival) -> str | None:
    """All bytes of a file, over as many connections as it takes; the sha256 over there, or None when the file
    has gone meanwhile."""
    failures = 0
    while True:
        before = arrival.at
        asked = {"offset": before, "prefix_sha256": arrival.sha256 if before else "", "raw": line.raw}
        arrival.begin(raw=line.raw)
        try:
            answer = line.call("pull_file", request | asked, arrival.event, arrival.data)
        except Changed:
            _no_longer_raw(line)
        except Unreachable:
            failures = 0 if arrival.at > before else failures + 1
            if failures >= TRIES:
                raise
            line.broken(failures)
        else:
            there = None if answer.get("gone") is True else text(answer.get("sha256"))
            if there in (None, arrival.sha256) or not line.raw:
                return there
            arrival.restart()
            _no_longer_raw(line)


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
        yield file if mine else None
