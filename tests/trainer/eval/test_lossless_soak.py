"""Losslessness at length: every architecture, many random targets and drafters, long texts. `make soak`.

A sample with fixed seeds runs in test_measure.py and ../test_decode.py.

Run: python -m pytest -m soak tests/trainer/eval/test_lossless_soak.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_bench import TAPS, ragged
from tiny_models import random_model

from trainer.evaluation.measure import Bench, Options
from trainer.evaluation.prompt_sets import given
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.sections import Evaluate


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_long_texts_are_the_targets_own(kind: str, seed: int, make_drafter: Callable[..., Drafter]) -> None:
    """In float32 to the last token, every block as the training pass sees it; in bfloat16 but for ties."""
    drafter = make_drafter(("sliding_attention", "full_attention"), seed)
    for dtype in (torch.float32, torch.bfloat16):
        target = Target(random_model(kind, seed).to(dtype), TAPS)
        section, options = Evaluate(new_tokens=160), Options(batch=2, sampled=False)
        result = Bench(target, drafter.to(dtype), section, options).measure(given("ragged", ragged()))
        if dtype == torch.float32:
            assert not result.found and not result.disagreeing
        else:
            assert all(each.divergence.near_tie for each in result.found)
