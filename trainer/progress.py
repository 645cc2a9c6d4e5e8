"""How far a run is, and what happened since the last report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.loss import Sums


@dataclass
class Clock:
    """How far training is, by steps, by its own time, or by what the whole run leaves for it."""

    steps: int | None
    seconds: float | None
    started: float

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def progress(self, step: int) -> float:
        """0 at the start; 1 when training is over."""
        shares = [0.0]
        if self.steps is not None:
            shares.append(step / self.steps)
        if self.seconds is not None:
            shares.append(self.elapsed_s / self.seconds if self.seconds > 0 else 1.0)
        return min(1.0, max(shares))


class Tally:
    """Loss sums, tokens and bad rows of the steps since the last report."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.sums: Sums | None = None
        self.tokens = 0
        self._bad: list[tuple[Tensor, Tensor]] = []

    def add(self, sums: Sums, tokens: int, bad: tuple[Tensor, Tensor] | None) -> None:
        """bad: the step's rows, and which of them had non-finite states."""
        self.sums = sums if self.sums is None else self.sums + sums
        self.tokens += tokens
        if bad is not None:
            self._bad.append(bad)

    @property
    def bad_rows(self) -> list[int]:
        """Read from the device here, once a report, not at every step."""
        return [row for rows, flags in self._bad for row in rows[flags.cpu()].tolist()]

    def metrics(self) -> dict[str, Any]:
        assert self.sums is not None
        sums = self.sums
        counted = sums.counted.clamp(min=1)
        return {
            "loss": round(float(sums.loss / sums.weight.clamp(min=1e-9)), 5),
            "slot_accuracy": [round(value, 4) for value in (sums.correct / counted).tolist()],
            "prefix_length": round(float(1 + sums.prefix / sums.blocks.clamp(min=1)), 4),
            "tokens_per_s": round(self.tokens / (time.monotonic() - self.started), 1),
        }
