"""Run with: pytest tests/unit/test_clock.py. The clock of the tests themselves."""

from __future__ import annotations

import signal

import clock
import pytest

LIMIT_S = 500.0


def test_what_has_a_deadline_of_its_own_is_not_cut_off_by_the_tests() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with pytest.raises(OSError, match="no mirror"), clock.stopped():
            assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "the build would be cut off"
            raise OSError("no mirror")
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= LIMIT_S, "the rest of the test has its limit"
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
