"""What a person sees of a run: lines, and on a terminal a bar that stays below them.

A log file gets plain lines with the time since the start; a terminal gets the same lines, and the progress as
one line that is drawn anew.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainer.words import duration

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


@dataclass(frozen=True)
class Standing:
    """Where training is, for people."""

    step: int
    share: float  # of training that is over
    loss: float
    acceptance_length: float | None  # the latest, by real decoding
    tokens_per_s: float
    eta_s: float | None
    slots: str = ""  # accuracy of each slot
    lr: float = 0.0

    def line(self) -> str:
        slots = f" slots {self.slots}" if self.slots else ""
        return (
            f"step {self.step} loss {self.loss:.3f}{slots} lr {self.lr:.2g} "
            f"{self.tokens_per_s:,.0f} tokens/s {self.share:.0%} {self._accepted()}ETA {duration(self.eta_s)}"
        )

    def _accepted(self) -> str:
        return "" if self.acceptance_length is None else f"acceptance length {self.acceptance_length:.2f} "

    def short(self) -> str:
        """For one line of a terminal."""
        return (
            f"step {self.step} loss {self.loss:.3f} {self._accepted()}{self.tokens_per_s:,.0f} tokens/s "
            f"ETA {duration(self.eta_s)}"
        )


class Console(Protocol):
    def say(self, text: str) -> None:
        """A line that stays."""

    def show(self, standing: Standing) -> None:
        """Where training is."""

    def close(self) -> None:
        """No more of training."""


class Plain:
    """Lines, through any `say`: for logs and tests."""

    def __init__(self, say: Any) -> None:
        self.say = say

    def show(self, standing: Standing) -> None:
        self.say(standing.line())

    def close(self) -> None:
        pass


class Terminal:
    """Lines above a bar."""

    def __init__(self, started: float, file: Any = None) -> None:
        from rich.console import Console as Rich

        self._started = started
        self._console = Rich(file=file, highlight=False)
        self._bar: Bar | None = None

    def say(self, text: str) -> None:
        self._console.print(stamped(text, self._started), markup=False, soft_wrap=True)

    def show(self, standing: Standing) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        if self._bar is None:
            columns = (
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=1.0)
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=standing.share, description=standing.short())

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def stamped(text: str, started: float) -> str:
    return f"[{time.monotonic() - started:6.1f} s] {text}"


def for_stdout(started: float) -> Console:
    """A bar where stdout is a terminal; else plain lines."""
    if sys.stdout.isatty():
        return Terminal(started)
    return Plain(lambda text: print(stamped(text, started), flush=True))
