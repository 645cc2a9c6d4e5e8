"""How long a run's log was at which time: `logs --since` works for programs that print no times.

`log_index.jsonl` gets a line {"at", "inode", "size"} at most every 15 s, and only when the log has grown
(400 kB a day). It is a help: without it, or with a damaged one, the log is shown from its beginning.
"""

from __future__ import annotations

import json
import os
import time
from typing import Optional

from ..records.runfolder import VERSION, RunFolder, number, read_lines

NAME = "log_index.jsonl"
EVERY_S = 15.0


class LogIndex:
    """The supervisor's side: one stat now and then, one short line when the log has grown."""

    def __init__(self, run: RunFolder, log: str) -> None:
        self._path = run.file(NAME)
        self._log = log
        self._next = 0.0
        self._size = 0

    def look(self) -> None:
        """Never raises: a full disk must not end the run that it serves."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY_S
        try:
            status = os.stat(self._log)
            if status.st_size == self._size:
                return
            entry = {"version": VERSION, "at": time.time(), "inode": status.st_ino, "size": status.st_size}
            line = json.dumps(entry)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)
            self._size = status.st_size
        except OSError:
            pass


def offset_at(run: RunFolder, inode: int, wall: float) -> Optional[int]:
    """Where the log (this file of it) ended at that time or a little before; 0 when it began later.

    None when nobody kept an index. What was written after `wall` is behind this place for certain.
    """
    found: Optional[int] = None
    for entry in read_lines(run.file(NAME)):
        at, size = number(entry.get("at")), number(entry.get("size"))
        if at is None or size is None:
            continue
        if found is None:
            found = 0
        if at > wall:
            break
        found = int(size) if entry.get("inode") == inode else 0
    return found
