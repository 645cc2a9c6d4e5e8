"""Run: python -m pytest tests/trainer/test_words.py"""

from __future__ import annotations

import pytest

from trainer.words import first_line, plural


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (12_345, "12,345 rows")]
)
def test_one_is_singular_and_thousands_have_commas(number: int, said: str) -> None:
    assert plural(number, "row") == said


@pytest.mark.parametrize(
    ("error", "shown", "with_kind"),
    [
        (ValueError("\n no shape \n  of any size"), "no shape", "ValueError: no shape"),
        (AssertionError(), "AssertionError", "AssertionError"),
        (RuntimeError(" \n"), "RuntimeError", "RuntimeError"),
    ],
)
def test_an_error_on_one_line(error: Exception, shown: str, with_kind: str) -> None:
    assert (first_line(error), first_line(error, kind=True)) == (shown, with_kind)
