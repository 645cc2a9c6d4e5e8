"""Run with: pytest tests/unit/test_clock.py. The clock of the tests themselves."""

from __future__ import annotations

import signal
import time

import clock
import pytest


def test_what_has_a_deadline_of_its_own_is_not_cut_off_by_the_tests() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 0)
    heard: list[int] = []
    old = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(OSError, match="no mirror"), clock.stopped():
            time.sleep(0.4)
            assert heard == [], "the build was cut off"
            raise OSError("no mirror")
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2, "the rest of the test has its limit again"
    finally:
        signal.signal(signal.SIGALRM, old)
        signal.setitimer(signal.ITIMER_REAL, *before)
