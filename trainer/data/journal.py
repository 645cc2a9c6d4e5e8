"""What `regenerate` keeps while it works: one line for each row of the input, in the input's order.

The first line holds the settings; work goes on only under the same. A line that was cut off is dropped, so
the number of lines says which row is next.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from trainer.errors import ConfigError
from trainer.writing import make_folder

Status = Literal["success", "failed", "skipped"]
SYNC_EVERY_S = 5.0


@dataclass(frozen=True)
class Result:
    """What became of one row: the new row, or why there is none (then `row` is the old one, if any)."""

    line: int
    status: Status
    row: dict[str, Any] | None = None
    reason: str = ""
    tokens: int = 0  # written by the target


@dataclass
class Counts:
    """The accounting."""

    success: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        setattr(self, result.status, getattr(self, result.status) + 1)
        self.tokens += result.tokens
        if result.reason:
            self.reasons[result.reason] = self.reasons.get(result.reason, 0) + 1

    @property
    def rows(self) -> int:
        return self.success + self.failed + self.skipped

    def __str__(self) -> str:
        return f"{self.success:,} success, {self.failed:,} failed, {self.skipped:,} skipped"


class Journal:
    """Lines beside the output until it is complete.

    Args:
        window: rows are done so many at a time; of a window that is not complete nothing is kept.
    Raises:
        ConfigError: other settings made what is there, or another process is at it.
    """

    def __init__(self, out: Path, settings: dict[str, Any], window: int) -> None:
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        make_folder(out.parent)
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                "another regenerate is making this file", where=str(out), next="wait for it, or end it first"
            ) from None
        self.counts = Counts()
        self._synced = time.monotonic()
        self._begin(json.loads(json.dumps(settings)), window)

    def _begin(self, settings: dict[str, Any], window: int) -> None:
        self._file.seek(0)
        head = _whole(self._file.readline())
        if head is not None and head.get("settings") != settings and _whole(self._file.readline()) is None:
            head = None  # no row is there that other settings made
        if head is None:
            self._file.truncate(0)
            self._write({"settings": settings})
            return
        if head.get("settings") != settings:
            found = head.get("settings") or {}
            other = sorted(key for key in {*settings, *found} if settings.get(key) != found.get(key))
            self._file.close()
            raise ConfigError(
                f"was begun with other settings ({', '.join(other)})",
                where=str(self.path),
                next="use the same, or remove that file, or name another --out",
            )
        ends, results = [self._file.tell()], []
        while (line := _whole(self._file.readline())) is not None:
            results.append(Result(**line))
            ends.append(self._file.tell())
        kept = len(results) // window * window
        self._file.truncate(ends[kept])
        self._file.seek(0, os.SEEK_END)
        for result in results[:kept]:
            self.counts.add(result)

    def add(self, result: Result) -> None:
        self._write({key: value for key, value in vars(result).items() if value not in (None, "", 0)})
        self.counts.add(result)

    def _write(self, value: dict[str, Any]) -> None:
        _put(self._file, value)
        self._file.flush()
        if time.monotonic() - self._synced >= SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def finish(self, source: str) -> None:
        """Write the output, and beside it what failed or was skipped, and give them their names."""
        failed = self.out.with_name(self.out.name + ".failed")
        aside = {path: path.with_name(f".{path.name}.tmp") for path in (failed, self.out)}
        self._file.seek(0)
        self._file.readline()
        with aside[self.out].open("wb") as good, aside[failed].open("wb") as bad:
            for line in self._file:
                result = Result(**json.loads(line))
                if result.status == "success":
                    _put(good, result.row or {})
                else:
                    why = {
                        "status": result.status,
                        "reason": result.reason,
                        "from": f"{source}:{result.line}",
                    }
                    _put(bad, {**(result.row or {}), "regenerate": why})
            for file in (good, bad):
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in aside.items():
            temporary.replace(path)
        self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _put(file: Any, value: dict[str, Any]) -> None:
    try:
        line = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which is JSON and no UTF-8
        line = json.dumps(value).encode()
    file.write(line + b"\n")


def _whole(line: bytes) -> dict[str, Any] | None:
    """The object of a complete line; None for a line that was cut off, or none."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
