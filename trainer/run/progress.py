"""How far a run is, and what happened since the last report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.culprits import Who
from trainer.topology.work import Bad
from trainer.training.loss import Sums


@dataclass
class Clock:
    """How far training is, by steps, by its own time, or by what the whole run leaves for it."""

    steps: int | None
    seconds: float | None
    started: float  # of training; earlier for a run that goes on from a checkpoint

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

    def left_s(self, step: int, step_s: float | None) -> float | None:
        """What is left of training, by the time that a step takes; None before that is known."""
        left = [] if self.seconds is None else [self.seconds - self.elapsed_s]
        if self.steps is not None and step_s is not None:
            left.append((self.steps - step) * step_s)
        return max(0.0, min(left)) if left else None

    def expected_steps(self, step: int) -> int | None:
        """Steps of the whole run, by those that are done; None: there is no end."""
        if self.seconds is None:
            return self.steps
        return round(step / max(self.progress(step), 1e-9))


class Every:
    """Something to do each so many steps of the whole run, or seconds; whichever comes. Neither: never."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self.steps, self.seconds = steps, seconds
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Asked once after each step."""
        by_time = self.seconds is not None and time.monotonic() - self._last >= self.seconds
        return by_time or (self.steps is not None and step % self.steps == 0)

    def done(self) -> None:
        self._last = time.monotonic()

    @property
    def ever(self) -> bool:
        return self.steps is not None or self.seconds is not None


class Tally:
    """Loss sums, tokens and bad rows of the steps since the last report."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.sums: Sums | None = None
        self.tokens = self.steps = 0
        self._bad: list[Bad] = []

    def add(self, sums: Sums, tokens: int, bad: Bad | None, norm: Tensor | None = None) -> None:
        """
        Args:
            bad: which of the step's rows had non-finite states.
            norm: the gradient's; a step for which it is not finite was not taken, so its sums do not count.
        """
        if norm is not None:
            parts = (getattr(sums, name) for name in sums.__dataclass_fields__)
            good = norm.isfinite()
            sums = Sums(*(torch.where(good.to(part.device), part, torch.zeros_like(part)) for part in parts))
        self.sums = sums if self.sums is None else self.sums + sums
        self.tokens += tokens
        self.steps += 1
        if bad is not None:
            self._bad.append(bad)

    @property
    def bad_rows(self) -> list[int]:
        """Read from the device here, once a report, not at every step."""
        return [row for bad in self._bad for row in bad.rows[bad.flags.cpu()].tolist()]

    @property
    def bad_makers(self) -> dict[int, Who]:
        """Whose states they were, where there are several who make some."""
        return {
            row: maker
            for rows, flags, makers in self._bad
            for row, bad, maker in zip(rows.tolist(), flags.tolist(), makers, strict=False)
            if bad
        }

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
