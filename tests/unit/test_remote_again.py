"""Run with: pytest tests/unit/test_remote_again.py. How long a command waits before it tries a host again."""

from __future__ import annotations

import pytest

from dflashctl.remote.again import pause_s


@pytest.mark.parametrize(
    ("failures", "usual_s", "waited_s"),
    [
        (0, 2.0, 2.0),
        (1, 2.0, 4.0),
        (2, 2.0, 8.0),
        (3, 2.0, 15.0),
        (1, 1.0, 2.0),
        (3, 60.0, 60.0),
        (20_000, 1.0, 15.0),
        (20_000, 0.2, 15.0),
        (20_000, 3600.0, 3600.0),
    ],
)
def test_the_pause_grows_and_stays_bounded_for_days(failures: int, usual_s: float, waited_s: float) -> None:
    assert pause_s(failures, usual_s) == waited_s
