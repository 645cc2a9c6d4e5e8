"""A run's log, byte by byte and in order, however often the connection breaks; and its lines for people."""

from __future__ import annotations

import base64
import binascii
import codecs
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dflashctl.config.hosts import Host
from dflashctl.errors import ContainerDown, Unreachable
from dflashctl.remote.again import let_go, pause_s
from dflashctl.remote.agent_call import Event, call
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine
from dflashctl.render.secrets import hide
from dflashctl.runs.facts import text, whole

FOLLOW_S = 20.0
"""One call follows for so long; then a new one goes on, on the same connection."""
SLACK_S = 30.0
ANSWER_BYTES = 4 * 2**20
"""Of one call: a line of 256 KiB a second carries it within SLACK_S."""

TAIL_BYTES = 1024
MAX_LINE_CHARS = 64 * 1024
"""A longer line is shown in pieces: a program that never ends a line must not fill the memory."""


@dataclass
class Position:
    """Where the log has been read to, and whose log it is."""

    state_dir: str
    tag: str | None
    lines: int
    since_s: float | None = None
    run_id: str = ""
    inode: int | None = None
    offset: int | None = None
    tail: bytes = b""
    """The end of the last piece: by it the other side sees that the log was cut and has grown again."""

    def request(self, wait_s: float) -> dict[str, Any]:
        """The run is known by id from the first answer on, so a new launch with the tag is not mixed in."""
        started = self.offset is not None
        return {
            "state_dir": self.state_dir,
            "tag": None if self.run_id else self.tag,
            "id": self.run_id or None,
            "lines": self.lines,
            "since_s": None if started else self.since_s,
            "offset": self.offset if started else None,
            "inode": self.inode if started else None,
            "tail": {"bytes": len(self.tail), "crc32": zlib.crc32(self.tail)} if started else None,
            "wait_s": wait_s,
            "max_bytes": ANSWER_BYTES,
        }


@dataclass
class Source:
    """What arrives, to be overridden by who shows it."""

    on_run: Callable[[dict[str, Any]], None] = lambda run: None
    on_data: Callable[[bytes], None] = lambda data: None
    on_notice: Callable[[str], None] = lambda notice: None


def read(
    host: Host,
    source: Source,
    *,
    tag: str | None = None,
    lines: int = 0,
    since_s: float | None = None,
    follow: bool = False,
    connect: Callable[[Host], Engine] = open_engine,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Read to the end, or follow until the run has ended. While following, lost contact is said and survived.

    Raises NotFound; Unreachable and ContainerDown before the first contact, and when not following after a
    call that brought nothing.
    """
    position = Position(host.state_dir, tag, lines, since_s)
    engine: Engine | None = None
    failures, end = 0, None
    told: set[str] = set()

    def heard(event: Event) -> None:
        """The first word after lost contact is contact, long before the call has ended."""
        nonlocal failures
        if failures:
            source.on_notice("in contact again")
            told.clear()
        failures = 0
        receive(event, position, source)

    try:
        while True:
            before = position.inode, position.offset
            try:
                engine = engine or connect(host)
                wait_s = FOLLOW_S if follow else 0.0
                answer = call(
                    engine,
                    "read_log",
                    position.request(wait_s),
                    timeout_s=wait_s + SLACK_S,
                    on_event=heard,
                )
            except (Unreachable, ContainerDown) as error:
                if not follow and before != (position.inode, position.offset):
                    # A pager that was left open for a while, or a slow line: what has come stays.
                    let_go(engine)
                    engine = None
                    continue
                if not follow or not position.run_id:
                    raise
                # Each reason once: a container that stops breaks the line first, or was frozen first.
                why = error.what.splitlines()[0]
                if why not in told:
                    source.on_notice(f"no contact ({why}); trying again")
                told.add(why)
                let_go(engine)
                engine, failures = None, failures + 1
                sleep(pause_s(failures))
                continue
            position.inode, position.offset = whole(answer.get("inode")), whole(answer.get("offset"))
            # A program that writes faster than we read is not chased: what was there at first is the end.
            end = whole(answer.get("size")) or 0 if end is None else end
            if answer.get("done") is True or (not follow and (position.offset or 0) >= end):
                return
    finally:
        let_go(engine)


def receive(event: Event, position: Position, source: Source) -> None:
    """One event. The position moves with each piece that was taken, so a cut later repeats nothing."""
    run = event.get("run")
    if isinstance(run, dict):
        hide(run.get("secrets"))
        if not position.run_id:
            source.on_run(run)
        position.run_id = text(run.get("id"))
    if "data" in event:
        try:
            data = base64.b64decode(text(event["data"]), validate=True)
        except binascii.Error:
            data = b""
        source.on_data(data)
        position.tail = data[-TAIL_BYTES:]
        position.inode, position.offset = whole(event.get("inode")), whole(event.get("offset"))
    notices = {
        "rotated": "the log was rotated; going on in the new file",
        "truncated": "the log was cut; going on from its beginning",
        "missing": "the log is not there",
        "no_index": "when its lines were written is not known: from the beginning",
    }
    if text(event.get("notice")) in notices:
        if event.get("offset") is not None:
            position.inode, position.offset = whole(event.get("inode")), whole(event.get("offset"))
            position.tail = b""
        source.on_notice(notices[text(event.get("notice"))])


@dataclass
class Lines:
    """Bytes to lines. A character cut in two is put together; a carriage return starts the line anew."""

    live: str = ""
    """The line that has not ended: what its last carriage return left."""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("backslashreplace")
    )

    def feed(self, data: bytes, *, last: bool = False) -> Iterator[str]:
        """The lines that are complete now, without their ends, unescaped. `last`: nothing follows."""
        *done, rest = (self.live + self._decoder.decode(data, last)).split("\n")
        for each in done:
            yield overwritten(each)
        while len(rest) > MAX_LINE_CHARS and "\r" not in rest:
            yield rest[:MAX_LINE_CHARS]
            rest = rest[MAX_LINE_CHARS:]
        # A trailing carriage return may be half of a line's end: it stays until the next byte is known.
        end = "\r" if rest.endswith("\r") else ""
        self.live = overwritten(rest) + end
        if last and self.live:
            yield overwritten(self.live)
            self.live = ""


def overwritten(line: str) -> str:
    """What a terminal would show in the end of `10%\\r20%\\r`: the last part that is not empty."""
    return next((part for part in reversed(line.split("\r")) if part), "")
