"""The learning rate over a run: warm-up, then descent."""

from __future__ import annotations

import math

from trainer.sections import Schedule


def lr_factor(schedule: Schedule, step: int, progress: float, warmup_steps: int) -> float:
    """The learning rate over its peak.

    Args:
        step: counted from 0.
        progress: share of the run that is over, 0 to 1: by steps or, when the budget is time, by the clock.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(max(progress, 0.0), 1.0)
    if schedule.kind == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        rest = 1 - schedule.constant_share
        shape = 1.0 if progress <= schedule.constant_share or rest == 0 else (1 - progress) / rest
    return schedule.floor + (1 - schedule.floor) * shape
