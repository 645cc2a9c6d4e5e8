"""A child that imports torch: heard until it has said all or its time is over, and ended with its session."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from typing import Any, Callable, List, Optional

EVERY_S = 0.3
"""A sign of life meanwhile: a silent command makes the caller look at the freezer."""
END_S = 1.0
CHUNK_BYTES = 65536


def listen(
    descriptors: List[int],
    until: float,
    heard: Callable[[int, bytes], bool],
    tick: Optional[Callable[[], None]] = None,
) -> bool:
    """Hand everything that is said to `heard` (which descriptor, bytes), until it says True (enough) or all
    have ended; False when `until` (monotonic) comes before. `tick` is called every EVERY_S."""
    open_ones = list(descriptors)
    told = time.monotonic()
    while open_ones:
        now = time.monotonic()
        if now >= until:
            return False
        for descriptor in select.select(open_ones, [], [], min(EVERY_S, until - now))[0]:
            data = os.read(descriptor, CHUNK_BYTES)
            if not data:
                open_ones.remove(descriptor)
            elif heard(descriptor, data):
                return True
        if tick is not None and time.monotonic() - told >= EVERY_S:
            told = time.monotonic()
            tick()
    return True


def end(process: "subprocess.Popen[Any]") -> None:
    """Its session goes, in which nobody else is, and with it whatever it started. What hangs in the driver
    (state D) survives: it is left behind, not waited for, and dies with its call."""
    if process.returncode is not None:  # reaped: its number may be somebody else's by now
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        pass
