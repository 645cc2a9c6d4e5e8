"""A bench on tiny random models, and prompts for it."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import VOCABULARY

from trainer.evaluation.measure import Bench, Options
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.sections import Evaluate

TAPS = (0, 2, 4)


def bench(target: Target, drafter: Drafter, **options: Any) -> Bench:
    return Bench(target, drafter, Evaluate(new_tokens=12, temperature=0.8), Options(**options), 1)


def ragged() -> list[list[int]]:
    """Prompts of several lengths, not in their order."""
    generator = torch.Generator().manual_seed(8)
    return [
        torch.randint(2, VOCABULARY, (size,), generator=generator).tolist() for size in (6, 6, 9, 6, 9, 9)
    ]
