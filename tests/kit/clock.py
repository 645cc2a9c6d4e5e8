"""A test's clock (pytest-timeout's), stopped for what has a deadline of its own and no test can hurry."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped() -> Iterator[None]:
    """The time within does not count toward the limit of the test that happens to need it first."""
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
