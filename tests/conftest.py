"""What could not be proven on this machine is said loudly at the end, never lost among the dots."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "kit"))  # what several layers use

# The same examples each time, and no clock: what fails fails for everybody. `make soak` draws fresh ones.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("fixed", derandomize=True, **_PATIENT)
settings.register_profile("fresh", derandomize=False, print_blob=True, max_examples=1000, **_PATIENT)
settings.load_profile("fixed")

# xdist tells its workers the terminal's width; output that programs read must not be folded to it.
os.environ.pop("COLUMNS", None)
# A job in the background inherits an ignored SIGINT, one of nohup an ignored SIGHUP; so would every program
# that a test sends one.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


if "PYTEST_XDIST_WORKER" in os.environ:  # it has told all by then, and need not take torch apart
    atexit.register(os._exit, 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Torch and thousands of tests are made here and stay: looking through them for garbage, again and again,
    took a quarter of the collection's time. Later collections leave them out, too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # for the interpreter's end, which says of objects that it cannot free that they leak


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason that begins with DID NOT RUN, with the number of tests."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if "DID NOT RUN" in text:
            reasons[text[text.index("DID NOT RUN") :]] += 1
    if reasons:
        terminalreporter.section("NOT PROVEN HERE", sep="!", red=True, bold=True)
        for reason, count in reasons.items():
            terminalreporter.write_line(f"{count} tests {reason}", red=True, bold=True)
