"""Rows with hidden states that are not finite.

Run: python -m pytest tests/trainer/test_bad_rows.py
"""

from __future__ import annotations

import pytest

from trainer.bad_rows import newly_bad
from trainer.errors import DataError


def test_a_row_counts_once_however_often_it_is_read() -> None:
    known: list[int] = []
    for epoch in range(50):
        new = newly_bad([7, 3, 7], known, allowed=2, total=100)
        assert new == ([] if epoch else [3, 7])
        known += new
    assert newly_bad([], known, allowed=2, total=100) == []


def test_more_distinct_rows_than_allowed_end_the_run_and_are_named() -> None:
    assert newly_bad([1, 2], [9], allowed=3, total=100) == [1, 2]
    with pytest.raises(DataError) as caught:
        newly_bad([1, 2, 9, 4, 5, 6], [9], allowed=5, total=1000)
    text = str(caught.value)
    assert "6 of 1,000 rows have non-finite hidden states (rows 9, 1, 2, 4, 5, ...)" in text
    assert "train.data.max_bad_rows" in text and "weights and dtype" in text


def test_when_every_row_is_bad_no_bound_helps() -> None:
    with pytest.raises(DataError, match="3 of 3 rows have non-finite hidden states"):
        newly_bad([2], [0, 1], allowed=8, total=3)


def test_rows_packed_anew_for_every_epoch_count_within_their_epoch() -> None:
    """10 rows an epoch, numbered on: one bad document makes another row bad in each."""
    known: list[int] = []
    for row in (4, 17, 20, 39, 41):
        assert newly_bad([row], known, allowed=1, total=10) == [row]
        known.append(row)
    with pytest.raises(DataError, match=r"2 of 10 rows have non-finite hidden states \(rows 41, 43\)"):
        newly_bad([43], known, allowed=1, total=10)
