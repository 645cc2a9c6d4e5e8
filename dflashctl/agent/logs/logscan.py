"""What a log says about trouble: exceptions, known failures, the last step. Bounded, and able to go on later.

A log may have gigabytes. It is read block by block from its beginning (the first failure is the cause of the
others) for as long as the time allows; its last part is read in any case, because it tells about now. What
lies between is skipped and said so. `resume` of one answer, handed back with the next question, makes the
next scan read new bytes only (`status --watch`).
"""

from __future__ import annotations

import os
import re
import time
import zlib
from typing import Any, Dict, List, Optional, Pattern, Tuple

from .logknown import Known, Matcher, line_around

HEAD_BYTES = 1 * 2**20
"""Read whatever the time says."""
TAIL_BYTES = 4 * 2**20
BLOCK_BYTES = 1 * 2**20
BUDGET_S = 1.0
"""For what lies between; an ordinary log makes about 100 MB in this time."""
COUNT_S = 1.0
"""Newlines of the skipped part are counted for so long (about 1 GB); beyond, line numbers are unknown."""
OPEN_BYTES = 64 * 2**10
"""A traceback at the log's end may still be being written; so much is read again next time."""
TEXT_CHARS = 300
MARK_BYTES = 1024
"""So much before the point where a scan ended is remembered by its checksum: a log that was cut and has grown
past that point again must not be taken for the old one."""
STEP_BYTES = 256 * 2**10

_TRACEBACK = b"Traceback (most recent call last)"
_OTHERS = re.compile(rb"^[|+]|Traceback \(most recent call last\)|Exception in thread ")
"""Lines of a group of exceptions, and headers of other tracebacks."""
_EXCEPTION = re.compile(
    rb"(?![A-Z]+:)(?:[A-Za-z_][\w<>]*\.)*_*[A-Z]\w*(?::|: (?![ :]).*)?$|(?:[A-Za-z_][\w<>]*\.)+\w+:(?: |$)"
)
"""The last line of a traceback: a class's name, with a capital letter or a dot, and what it says, where that
does not begin on the next line. Not "INFO: x", nor the rest of another thread's line."""
_CHAIN_WORD = b"above exception"
_CHAINED = (
    b"During handling of the above exception, another exception occurred",
    b"The above exception was the direct cause of the following exception",
)

Hit = Dict[str, Any]


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

    def feed(self, data: bytes, known: Matcher, step: Optional[Pattern[bytes]], look_back: int) -> None:
        """Whole lines (the last may lack its newline). A step is looked for in the last `look_back` bytes."""
        # A chain of tracebacks is one exception. A chain may be cut between two calls: the sum still holds.
        headers = data.count(_TRACEBACK)
        if headers or _CHAIN_WORD in data:
            self.exceptions += headers - sum(data.count(each) for each in _CHAINED)
        header = data.find(_TRACEBACK) if headers and self.first_exception is None else -1
        if header >= 0:
            at, text = exception_after(data, header)
            self.first_exception = {"line": self._line(data, at), "text": text}
        for row, begin, end in known.lines(data):
            hit = self.known.get(row.name)
            if hit is None:
                text = show(data[begin:end])
                self.known[row.name] = {"count": 1, "line": self._line(data, begin), "text": text}
            else:
                hit["count"] += 1
        if step is not None:
            self.step = last_step(data, step, self.step, look_back)
        if self.lines is not None:
            self.lines += data.count(b"\n")

    def _line(self, data: bytes, at: int) -> Optional[int]:
        return None if self.lines is None else self.lines + data.count(b"\n", 0, at) + 1

    def skip(self, file: Any, count: int) -> None:
        """Pass over `count` bytes, keeping the line number where that is affordable."""
        until = time.monotonic() + COUNT_S
        while count > 0 and self.lines is not None:
            data = file.read(min(count, 2**20))
            if not data:
                return
            self.lines += data.count(b"\n")
            count -= len(data)
            if count > 0 and time.monotonic() > until:
                self.lines = None
        file.seek(count, os.SEEK_CUR)


def show(line: bytes) -> str:
    """For people: the last state of a carriage-return progress line, cut. Escaped where it is shown."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace").strip()
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"


def exception_after(data: bytes, header: int) -> Tuple[int, str]:
    """(offset of the line, text) of the exception that ends the traceback whose header is at `header`.

    Lines of other writers may stand between (threads that fail together write into each other's tracebacks),
    and each line may carry a prefix such as "[rank0]: ". A bare "AssertionError" gets the source line above
    it, which says what was asserted. Where no line reads as an exception, the first that is not indented
    answers, and for a traceback without its end, the header.
    """
    begin, end = line_around(data, header)
    prefix = prefix_of(data, header)
    otherwise = (begin, show(data[header:end]))
    source, closed = b"", False
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
            elif _EXCEPTION.match(rest):
                bare = b":" not in rest and source
                return position, show(rest + (b" \xe2\x80\xa6 " + source if bare else b""))
            elif rest and not closed and not _OTHERS.search(rest):
                otherwise, closed = (position, show(rest)), True
        position = stop + 1
    return otherwise


def prefix_of(data: bytes, header: int) -> bytes:
    """What stands before each line of the traceback whose header is at `header`; empty where only the header
    has it: a time, or a line that had not ended."""
    begin, end = line_around(data, header)
    prefix = data[begin:header]
    return prefix if data.find(b"\n" + prefix + b"  File ", end, end + OPEN_BYTES) >= 0 else b""


def last_step(
    data: bytes, pattern: Pattern[bytes], before: Optional[int], look_back: int = STEP_BYTES
) -> Optional[int]:
    """The step of the last line that the recipe's `step_regex` finds, in the last `look_back` bytes."""
    found = None
    for found in pattern.finditer(data, max(len(data) - look_back, 0)):  # noqa: B007
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
    block_bytes: int = BLOCK_BYTES,
    budget_s: float = BUDGET_S,
) -> Dict[str, Any]:
    """Findings in the log from byte `start` on.

    `lines` numbers are those of the whole file, as an editor shows them. Returns as_json() of the counts,
    `skipped_bytes`, `last_line`, and `resume`: handed back, the answer is that of a whole scan at the price
    of the new bytes (a file that was replaced, or cut, is scanned anew). Raises OSError.
    """
    matcher, until = Matcher(known), time.monotonic() + budget_s
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        counts, offset, skipped = Counts(), min(start, size), 0
        if resume and is_same(file, status, resume):
            counts, offset, skipped = Counts(resume["counts"]), resume["offset"], resume["skipped_bytes"]
            file.seek(offset)
        else:
            counts.skip(file, offset)
        first, held = offset, b""
        while True:
            done = file.tell()
            over = size - tail_bytes - done
            if over > 0 and done - first >= head_bytes and time.monotonic() >= until:
                # The held part is an unfinished line or traceback: what is known of it is all there will be.
                counts.feed(held, matcher, step, len(held))
                held = b""
                counts.skip(file, over)
                skipped += over
                continue
            block = file.read(min(block_bytes, size - done))
            data = held + block
            if not block:
                break
            whole = settled(data, block_bytes)
            counts.feed(whole, matcher, step, STEP_BYTES if over <= 0 else STEP_BYTES // 16)
            held = data[len(whole) :]
            offset = done + len(block) - len(held)
        mark = mark_before(file, offset)
        last_line = read_last_line(file, start, size)
    # What may still grow is counted now, and read again next time.
    resume = {
        "inode": status.st_ino,
        "offset": offset,
        "mark": mark,
        "counts": Counts(counts.as_json()).as_json(),
        "skipped_bytes": skipped,
    }
    counts.feed(held, matcher, step, len(held))
    answer = counts.as_json()
    answer.update(skipped_bytes=skipped, resume=resume, last_line=last_line)
    return answer


def settled(data: bytes, longest: int = BLOCK_BYTES) -> bytes:
    """The part that cannot change its meaning by what follows: whole lines, without tracebacks at the end
    that may still be being written (several at once, by threads that fail together). A line of `longest`
    bytes is taken as it is."""
    end = data.rfind(b"\n") + 1
    if not end:
        return data if len(data) >= longest else b""
    opened = data.find(_TRACEBACK, max(end - OPEN_BYTES, 0), end)
    return data[: end if opened < 0 else line_around(data, opened)[0]]


def read_last_line(file: Any, start: int, size: int) -> str:
    """The last line that is not empty, of this run's part."""
    begin = max(start, size - 4 * TEXT_CHARS, 0)
    lines = os.pread(file.fileno(), max(size - begin, 0), begin).rstrip(b"\r\n \t").split(b"\n")
    return show(lines[-1])


def mark_before(file: Any, offset: int) -> int:
    """A checksum of the bytes before `offset`."""
    begin = max(offset - MARK_BYTES, 0)
    return zlib.crc32(os.pread(file.fileno(), offset - begin, begin))


def is_same(file: Any, status: os.stat_result, resume: Dict[str, Any]) -> bool:
    """Is this the file that an earlier scan read, grown?"""
    offset = int(resume.get("offset") or 0)
    if resume.get("inode") != status.st_ino or offset > status.st_size:
        return False
    return resume.get("mark") == mark_before(file, offset)
