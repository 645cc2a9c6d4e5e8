"""What everybody does who goes on after lost contact: let go of the old engine, pause, connect anew."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dflashctl.errors import DflashError

if TYPE_CHECKING:
    from dflashctl.remote.engine import Engine

SLOWEST_S = 15.0
DOUBLINGS = 10
"""More change nothing; a host may be away for days, and 2**1024 is no float any more."""


def pause_s(failures: int, usual_s: float = 1.0) -> float:
    """How long to wait after so many failures in a row: twice as long each time, up to SLOWEST_S (or to
    `usual_s`, the pause without any, where that is longer)."""
    return min(usual_s * 2 ** min(failures, DOUBLINGS), max(SLOWEST_S, usual_s))


def let_go(engine: Engine | None) -> None:
    """Close without a word: the connection may be dead already."""
    if engine is not None:
        with suppress(DflashError, OSError):
            engine.close()
