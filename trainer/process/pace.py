"""Where a process is in its work, and how long it may be silent there."""

from __future__ import annotations

import statistics
from collections import deque

PHASES = ("loading", "data", "compiling", "training", "evaluating", "saving", "done")
# How old a heartbeat may be in each phase before the run counts as stale. Loading and compiling are single
# calls, and data ends with one: writing it for other processes.
DEADLINE_S = {
    "loading": 900.0,
    "data": 300.0,
    "compiling": 900.0,
    "training": 60.0,
    "evaluating": 120.0,
    "saving": 300.0,
    "done": 60.0,
}
# In training a beat may be a whole step, and other programs may take most of the machine. Before a step has
# been timed, this many times the phase's deadline; then this many times the slowest step, if that is more.
UNTIMED = 4
SLOWER = 10


class Pace:
    """The phase, and the time that the last hundred steps took. `now`: seconds of the monotonic clock."""

    def __init__(self, now: float) -> None:
        self.phase, self.phase_since = "loading", now
        self.loading_s = DEADLINE_S["loading"]  # until it is known how much there is to load
        self._step_times: deque[float] = deque(maxlen=101)
        self._last_step_at: float | None = None

    def enter(self, phase: str, now: float) -> None:
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
        self.phase, self.phase_since = phase, now
        self._last_step_at = None  # time between phases is no step time

    def stepped(self, now: float) -> None:
        """A training step is done."""
        if self._last_step_at is not None:
            self._step_times.append(now - self._last_step_at)
        self._last_step_at = now

    @property
    def deadline_s(self) -> float:
        """How old the heartbeat may become now."""
        allowed = self.loading_s if self.phase == "loading" else DEADLINE_S[self.phase]
        if self.phase != "training":
            return allowed
        if not self._step_times:
            return UNTIMED * allowed
        return max(allowed, SLOWER * max(self._step_times))

    @property
    def median_step_s(self) -> float | None:
        """Of the last hundred steps; None before the second."""
        return statistics.median(self._step_times) if self._step_times else None
