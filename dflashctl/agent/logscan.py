"""What a log says about trouble: exceptions, known failures, the last step. Bounded, and able to go on later.

A log may have gigabytes. Its first part is read because the first failure is the cause of the others, its
last part because it tells about now; what lies between is skipped and said so. `resume` of one answer, handed
back with the next question, makes the next scan read new bytes only (`status --watch`).
"""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Optional, Pattern, Tuple

HEAD_BYTES = 1 * 2**20
TAIL_BYTES = 4 * 2**20
COUNT_BYTES = 512 * 2**20
"""Newlines are counted in at most so much of the skipped part; beyond, later line numbers are unknown."""
OPEN_BYTES = 64 * 2**10
"""A traceback at the log's end may still be being written; so much is read again next time."""
TEXT_CHARS = 300

_TRACEBACK = b"Traceback (most recent call last)"
_CHAINED = (
    b"During handling of the above exception, another exception occurred",
    b"The above exception was the direct cause of the following exception",
)

Hit = Dict[str, Any]


class Known:
    """A compiled row of the table of known failures."""

    def __init__(self, row: Dict[str, Any]) -> None:
        self.name = str(row["name"])
        self.pattern: Pattern[bytes] = re.compile(str(row["pattern"]).encode("ascii"), re.M)
        unless = row.get("unless")
        self.unless: Optional[Pattern[bytes]] = re.compile(str(unless).encode("ascii")) if unless else None


class Counts:
    """What has been found so far; plain data in and out."""

    def __init__(self, start: Optional[Dict[str, Any]] = None) -> None:
        start = start or {}
        self.lines: Optional[int] = start.get("lines", 0)  # newlines before the next byte; None: not counted
        self.exceptions: int = start.get("exceptions", 0)
        self.first_exception: Optional[Hit] = start.get("first_exception")
        self.known: Dict[str, Hit] = {name: dict(hit) for name, hit in start.get("known", {}).items()}
        self.step: Optional[int] = start.get("step")

    def as_json(self) -> Dict[str, Any]:
        return {
            "lines": self.lines,
            "exceptions": self.exceptions,
            "first_exception": self.first_exception,
            "known": {name: dict(hit) for name, hit in self.known.items()},
            "step": self.step,
        }

    def feed(self, data: bytes, known: List[Known], step: Optional[Pattern[bytes]]) -> None:
        """Whole lines (the last may lack its newline)."""
        # A chain of tracebacks is one exception. A chain may be cut between two calls: the sum still holds.
        self.exceptions += data.count(_TRACEBACK) - sum(data.count(each) for each in _CHAINED)
        header = data.find(_TRACEBACK) if self.first_exception is None else -1
        if header >= 0:
            at, text = exception_after(data, header)
            self.first_exception = {"line": self._line(data, at), "text": text}
        for row in known:
            self._match(row, data)
        if step is not None:
            self.step = last_step(data, step, self.step)
        if self.lines is not None:
            self.lines += data.count(b"\n")

    def _match(self, row: Known, data: bytes) -> None:
        last_end = -1
        for found in row.pattern.finditer(data):
            begin, end = line_around(data, found.start())
            if begin < last_end:
                continue  # a line counts once
            last_end = end
            if row.unless is not None and row.unless.search(data, begin, end):
                continue
            hit = self.known.get(row.name)
            if hit is None:
                text = show(data[begin:end])
                self.known[row.name] = {"count": 1, "line": self._line(data, begin), "text": text}
            else:
                hit["count"] += 1

    def _line(self, data: bytes, at: int) -> Optional[int]:
        return None if self.lines is None else self.lines + data.count(b"\n", 0, at) + 1

    def skip(self, file: Any, count: int) -> None:
        """Pass over `count` bytes, keeping the line number where that is affordable."""
        if count > COUNT_BYTES or self.lines is None:
            file.seek(count, os.SEEK_CUR)
            self.lines = None
            return
        while count > 0:
            data = file.read(min(count, 2**20))
            if not data:
                return
            self.lines += data.count(b"\n")
            count -= len(data)


def line_around(data: bytes, at: int) -> Tuple[int, int]:
    begin = data.rfind(b"\n", 0, at) + 1
    end = data.find(b"\n", at)
    return begin, len(data) if end < 0 else end


def show(line: bytes) -> str:
    """For people: the last state of a carriage-return progress line, cut. Escaped where it is shown."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace").strip()
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"


def exception_after(data: bytes, header: int) -> Tuple[int, str]:
    """(offset of the line, text) of the exception that ends the traceback whose header is at `header`.

    Lines of other writers may stand between, and each line may carry a prefix such as "[rank0]: ". A bare
    "AssertionError" gets the source line above it, which says what was asserted. A traceback without its end
    answers with the header.
    """
    begin, end = line_around(data, header)
    prefix = data[begin:header]
    source = b""
    position = end + 1
    for _ in range(2000):
        if position >= len(data):
            break
        stop = line_around(data, position)[1]
        line = data[position:stop]
        if line.startswith(prefix):
            rest = line[len(prefix) :].rstrip()
            if rest[:1] in (b" ", b"\t"):
                if rest.strip(b" \t^~"):
                    source = rest.strip()
            elif rest and not rest.startswith((_TRACEBACK, b"|", b"+")):
                bare = b":" not in rest and source
                return position, show(rest + (b" \xe2\x80\xa6 " + source if bare else b""))
        position = stop + 1
    return begin, show(data[header:end])


def last_step(data: bytes, pattern: Pattern[bytes], before: Optional[int]) -> Optional[int]:
    """The step of the last line that the recipe's `step_regex` finds, in the last 256 KiB of the data."""
    found = None
    for found in pattern.finditer(data, max(len(data) - 256 * 2**10, 0)):  # noqa: B007
        pass
    try:
        return int(found.group("step")) if found else before
    except (IndexError, ValueError, TypeError):
        return before


def compile_step(text: Any) -> Optional[Pattern[bytes]]:
    """A recipe's pattern for bytes; None for one that does not compile (the recipe's check has said so)."""
    if not isinstance(text, str) or not text:
        return None
    try:
        return re.compile(text.encode("utf-8"))
    except re.error:
        return None


def scan(
    path: str,
    start: int,
    known: List[Known],
    *,
    step: Optional[Pattern[bytes]] = None,
    resume: Optional[Dict[str, Any]] = None,
    head_bytes: int = HEAD_BYTES,
    tail_bytes: int = TAIL_BYTES,
) -> Dict[str, Any]:
    """Findings in the log from byte `start` on.

    `lines` numbers are those of the whole file, as an editor shows them. Returns as_json() of the counts with
    `skipped_bytes`, and `resume`: handed back, the answer is that of a whole scan, at the price of the new
    bytes (a file that was replaced or cut is scanned anew). Raises OSError.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        counts, offset, skipped = Counts(), min(start, status.st_size), 0
        if resume and resume.get("inode") == status.st_ino and resume.get("offset", 0) <= status.st_size:
            counts, offset, skipped = Counts(resume["counts"]), resume["offset"], resume["skipped_bytes"]
            file.seek(offset)
        else:
            counts.skip(file, offset)
        size = status.st_size
        if size - offset > head_bytes + tail_bytes:
            head = whole_lines(file.read(head_bytes))
            counts.feed(head, known, step)
            file.seek(offset + len(head))
            over = size - tail_bytes - (offset + len(head))
            counts.skip(file, over)
            skipped += over
            offset = size - tail_bytes
        data = file.read(size - offset)
    # What may still grow is counted now, and read again next time.
    done = whole_lines(data, b"")
    opened = done.rfind(_TRACEBACK, max(len(done) - OPEN_BYTES, 0))
    if opened >= 0:
        done = done[: line_around(done, opened)[0]]
    counts.feed(done, known, step)
    resume = {
        "inode": status.st_ino,
        "offset": offset + len(done),
        "counts": Counts(counts.as_json()).as_json(),
        "skipped_bytes": skipped,
    }
    counts.feed(data[len(done) :], known, step)
    answer = counts.as_json()
    answer.update(skipped_bytes=skipped, resume=resume)
    return answer


def whole_lines(data: bytes, otherwise: Optional[bytes] = None) -> bytes:
    """Up to the last newline; without one, `otherwise` (by default all of it)."""
    end = data.rfind(b"\n") + 1
    return data[:end] if end else (data if otherwise is None else otherwise)
