"""The words of a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

State = Literal[
    "queued", "starting", "compiling", "running", "slow", "wedged", "frozen",
    "finished", "failed", "killed", "cancelled", "lost", "unknown",
]  # fmt: skip
STATES: tuple[str, ...] = get_args(State)
Confidence = Literal["high", "medium", "low"]

ENDED: frozenset[State] = frozenset({"finished", "failed", "killed", "cancelled", "lost"})
BAD: frozenset[State] = frozenset({"failed", "wedged", "lost"})
"""What `status --check` reports with exit code 7."""


@dataclass(frozen=True)
class Verdict:
    """A state with its reasons. `for_s`: how long it has been so (running: since its start; ended: since its
    end); None when nobody can tell."""

    state: State
    confidence: Confidence
    evidence: tuple[str, ...]
    next: tuple[str, ...] = ()
    for_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def bad(self) -> bool:
        return self.state in BAD
