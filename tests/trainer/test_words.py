"""Run: python -m pytest tests/trainer/test_words.py"""

from __future__ import annotations

import pytest

from trainer.words import plural


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (12_345, "12,345 rows")]
)
def test_one_is_singular_and_thousands_have_commas(number: int, said: str) -> None:
    assert plural(number, "row") == said
