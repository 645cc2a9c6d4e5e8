"""What a run says at its end of drafter and prompt lookup.

Run: python -m pytest tests/trainer/test_report.py
"""

from __future__ import annotations

import pytest

from trainer.evaluation.evaluator import Figure, Measurement
from trainer.evaluation.report import make_report
from trainer.sections import Evaluate


@pytest.mark.parametrize(
    ("drafter", "lookup", "said"),
    [
        (2.5, 2.4, "the drafter is ahead (2.50 against 2.40)"),
        (2.4, 2.5, "prompt lookup is ahead (2.40 against 2.50)"),
        (2.0, 2.0, "neither is ahead (2.00 against 2.00)"),
        (2.001, 2.0, "neither is ahead (2.00 against 2.00)"),  # as far as the figures that are shown go
        (0.0, 0.0, "neither is ahead (0.00 against 0.00)"),
    ],
)
def test_who_is_ahead(drafter: float, lookup: float, said: str) -> None:
    mine, theirs = (Measurement(Figure(each, each), Figure(each, each)) for each in (drafter, lookup))
    notes = make_report(Evaluate(), None, mine, theirs, 0.0).notes
    assert notes[-2:] == [f"greedy: {said}", f"sampled: {said}"]
