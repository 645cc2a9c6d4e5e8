"""Operation `search_log`: the lines of a run's log that a person asks for; only they travel.

Request
    state_dir, tag | id   as for `read_log`
    grep                  a regular expression (Python's, on bytes), searched line by line; `ignore_case`
    errors                instead: whole tracebacks, lines that rows of `known` match, and `error: …` at the
                          beginning of a line, with the `next: …` and the indented lines behind it
    since_s               only what was written in the last so many seconds (see logindex.py)
    last                  only the last so many matches (0: all)

Progress events: {"run": {"id", "tag", "path", "secrets"}} first; {"lines": [[number, text], ...]}, in order;
{"searched": bytes} now and then. Answer: {"matches": how many there are, "sent", "size", "since_known"}.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections import deque
from typing import Any, BinaryIO, Callable, Deque, Dict, Iterator, List, Optional, Pattern, Tuple

from .. import AgentError
from ..records.pick import one_run
from ..records.runfolder import RunFolder
from . import logindex
from .logknown import Known, Matcher, line_around
from .logscan import _TRACEBACK, BLOCK_BYTES, exception_after, prefix_of, settled
from .ownlog import log_file

MOST = 10_000
"""Matches in one answer; a person who gets more has asked too widely."""
TEXT_BYTES = 2000
BATCH = 200
ERROR = b"error: "
MESSAGE_GOES_ON = (b"next: ", b"  ", ERROR)
MESSAGE_LINES = 100
MESSAGE_BELOW = (
    b"  ", b"\t", b"During handling of the above", b"The above exception was",
    b"ncclUnhandledCudaError", b"ncclSystemError", b"ncclInternalError", b"ncclRemoteError",
    b"ncclInvalidUsage", b"Last error:", b"Cuda failure", b"Search for `cuda", b"CUDA kernel errors might",
    b"For debugging consider", b"Compile with `TORCH_USE", b"Device-side assertion",
)  # fmt: skip
"""How further lines of an exception's message begin; others cannot be told from what is logged next."""
SAY_S = 1.0

Found = Tuple[int, int, int]
"""(begin, end of the line in the block, newlines before it in the block)."""


def search_log(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text. Raises AgentError("not_found"), and "usage" for a pattern that is none."""
    run = one_run(request)
    record = run.record().value or {}
    path = log_file(run, record)
    secrets = record.get("secrets") or []
    emit({"run": {"id": run.id, "tag": record.get("tag"), "path": path, "secrets": secrets}})
    pattern: Optional[Pattern[bytes]] = None
    if request.get("errors"):
        matcher = Matcher([Known(row) for row in request.get("known") or []])
        find: Callable[[bytes], Iterator[Found]] = lambda data: errors_in(data, matcher)  # noqa: E731
    else:
        pattern = compiled(str(request.get("grep") or ""), bool(request.get("ignore_case")))
        wanted = pattern
        find = lambda data: lines_in(data, wanted)  # noqa: E731
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise AgentError("not_found", "cannot read the log: %s" % error, path) from None
    with file:
        start, since_known = begin(run, file, record, request.get("since_s"))
        return {"since_known": since_known, **search(file, start, find, pattern, request, emit)}


def compiled(text: str, ignore_case: bool) -> Pattern[bytes]:
    try:
        return re.compile(text.encode("utf-8"), re.M | (re.I if ignore_case else 0))
    except re.error as error:
        what = "%r is not a regular expression: %s" % (text, error)
        raise AgentError("usage", what, "--grep", r"escape what is meant literally: \[ or \(") from None


def begin(run: RunFolder, file: BinaryIO, record: Dict[str, Any], since_s: Any) -> Tuple[int, bool]:
    """(first byte to search, whether `since_s` could be obeyed)."""
    start = max(int(record.get("log_start") or 0), 0)
    if since_s is None:
        return start, True
    offset = logindex.offset_at(run, os.fstat(file.fileno()).st_ino, time.time() - float(since_s))
    return max(start, offset or 0), offset is not None


def search(
    file: BinaryIO,
    start: int,
    find: Callable[[bytes], Iterator[Found]],
    pattern: Optional[Pattern[bytes]],
    request: Dict[str, Any],
    emit: Any,
) -> Dict[str, Any]:
    """Block by block, to where the file ended when the search began."""
    size = os.fstat(file.fileno()).st_size
    lines, last = count_lines(file, min(start, size)), max(int(request.get("last") or 0), 0)
    kept: Deque[List[Any]] = deque(maxlen=min(last or MOST, MOST))
    batch: List[List[Any]] = []
    matches = sent = 0
    held, said = b"", time.monotonic()

    def tell() -> None:
        emit({"searched": file.tell() - start})
        if getattr(emit, "gone", False):
            raise AgentError("unreachable", "nobody waits for this search any more")

    while not getattr(emit, "gone", False):
        block = file.read(min(BLOCK_BYTES, max(size - file.tell(), 0)))
        data = held + block
        whole = settled(data) if block else data
        with in_each_second_of_work(tell):
            for first, end, before in find(whole):
                matches += 1
                if last:
                    kept.append([lines + before + 1, shown(whole[first:end], pattern)])
                elif sent < MOST:
                    sent += 1
                    batch.append([lines + before + 1, shown(whole[first:end], pattern)])
        lines += whole.count(b"\n")
        held = data[len(whole) :]
        if len(batch) >= BATCH or (batch and not block):
            emit({"lines": batch})
            batch = []
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            tell()
        if not block:
            break
    if last:
        sent = len(kept)
        found = list(kept)
        for position in range(0, len(found), BATCH):
            emit({"lines": found[position : position + BATCH]})
    return {"matches": matches, "sent": sent, "size": size}


@contextlib.contextmanager
def in_each_second_of_work(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` after every second of CPU time, in the midst of one search of a pattern, too: a pattern
    like (a+)+$ can take hours for one line, and would go on beside the training when its person has left."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGVTALRM, lambda number, frame: tell())
    signal.setitimer(signal.ITIMER_VIRTUAL, SAY_S, SAY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def count_lines(file: BinaryIO, count: int) -> int:
    """Newlines in the first `count` bytes; leaves the file there."""
    lines = 0
    while count > 0:
        data = file.read(min(count, BLOCK_BYTES))
        if not data:
            break
        lines += data.count(b"\n")
        count -= len(data)
    return lines


def lines_in(data: bytes, pattern: Pattern[bytes]) -> Iterator[Found]:
    """Lines that the pattern finds. Where it can match a newline, each line is searched by itself; elsewhere
    the block is, which is many times faster."""
    position = newlines = 0
    if re.search(rb"\\[sSWDnrx0-9]|\[\^|\(\?[a-zA-Z-]*s|\\[AZ]", pattern.pattern):
        while position < len(data):
            end = line_around(data, position)[1]
            if pattern.search(data[position:end]):
                yield position, end, newlines
            position, newlines = end + 1, newlines + 1
        return
    counted = 0
    while position <= len(data):
        found = pattern.search(data, position)
        if found is None:
            return
        begin, end = line_around(data, found.start())
        if begin >= len(data):
            return  # an empty match behind the last newline
        newlines += data.count(b"\n", counted, begin)
        counted = begin
        yield begin, end, newlines
        position = end + 1


def errors_in(data: bytes, matcher: Matcher) -> Iterator[Found]:
    """Lines of whole tracebacks, and outside of them known failures and `error: …` messages."""
    wanted = {(begin, end) for _, begin, end in matcher.lines(data)}
    header = data.find(_TRACEBACK)
    while header >= 0:
        begin = line_around(data, header)[0]
        until = line_around(data, exception_after(data, header)[0])[1]
        until = message_end(data, max(until, line_around(data, header)[1]), prefix_of(data, header))
        position = begin
        while position < until:
            end = line_around(data, position)[1]
            wanted.add((position, end))
            position = end + 1
        header = data.find(_TRACEBACK, until)
    wanted.update(_messages(data))
    newlines = counted = 0
    for begin, end in sorted(wanted):
        newlines += data.count(b"\n", counted, begin)
        counted = begin
        yield begin, end, newlines


def message_end(data: bytes, end: int, prefix: bytes) -> int:
    """Where a message of several lines ends whose first line ends at `end`: to it belongs what is indented,
    what NCCL and CUDA write below theirs, and the sentence that leads to the next exception of a chain; each
    behind the prefix that all lines of the traceback have."""
    after = end
    for _ in range(MESSAGE_LINES):
        begin = after + 1
        if begin >= len(data) or (prefix and not data.startswith(prefix, begin)):
            break
        after = line_around(data, begin)[1]
        line = data[begin + len(prefix) : after]
        if not line.strip():
            continue
        if _TRACEBACK in line or not line.startswith(MESSAGE_BELOW):
            break
        end = after
    return end


def _messages(data: bytes) -> Iterator[Tuple[int, int]]:
    """(begin, end) of each line of `error: …` messages: the first, then what is indented or says `next: `."""
    begin = 0 if data.startswith(ERROR) else data.find(b"\n" + ERROR) + 1 or -1
    while begin >= 0:
        end = line_around(data, begin)[1]
        yield begin, end
        if data.startswith(MESSAGE_GOES_ON, end + 1):
            begin = end + 1
        else:
            begin = data.find(b"\n" + ERROR, end) + 1 or -1


def shown(line: bytes, pattern: Optional[Pattern[bytes]]) -> str:
    """Of a line that a progress bar overwrote: the part that matches, else the last one."""
    parts = [part for part in line.rstrip(b"\r").split(b"\r") if part] or [b""]
    if pattern is not None and len(parts) > 1:
        parts = [part for part in parts if pattern.search(part)] or parts
    return parts[-1][:TEXT_BYTES].decode("utf-8", "backslashreplace")
