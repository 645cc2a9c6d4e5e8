"""How far a long command is, at which rate, what time is left: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from trainer.words import duration

LINE_EVERY_S = 10.0


class Meter:
    """Counts up to `total`.

    Args:
        done: where the count begins, when work goes on; the rate counts from there.
        scale, unit: what is shown is the count divided by `scale`, in `unit`.
        tokens: the count of tokens at the beginning.
    """

    def __init__(
        self, title: str, total: float, done: float, scale: float, unit: str, tokens: int = 0
    ) -> None:
        self.title, self.total, self.scale, self.unit = title, total, scale, unit
        self.begun, self.begun_tokens = done, tokens
        self.done, self.tokens, self.extra = done, tokens, ""
        self.started = time.monotonic()
        self._said = self.started
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(title, total=total, completed=int(done), words="")

    def update(self, done: float, tokens: int, extra: str = "") -> None:
        self.done, self.tokens, self.extra = done, tokens, extra
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, words=self.words())
        elif now - self._said >= LINE_EVERY_S:
            self._said = now
            print(f"{self.title}: {self.words()}", file=sys.stderr, flush=True)

    def words(self) -> str:
        """12.5 of 100.0 MB, 3.2 MB/s, 810,000 tokens/s, 28.1 s left."""
        elapsed = max(1e-9, time.monotonic() - self.started)
        rate = (self.done - self.begun) / elapsed
        tokens = (self.tokens - self.begun_tokens) / elapsed
        left = duration((self.total - self.done) / rate if rate > 0 else None)
        scale = self.scale
        form = ",.0f" if scale == 1 else ",.1f"
        head = f"{self.done / scale:{form}} of {self.total / scale:{form}} {self.unit}"
        tail = f", {self.extra}" if self.extra else ""
        return f"{head}, {rate / scale:,.1f} {self.unit}/s, {tokens:,.0f} tokens/s, {left} left{tail}"

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
