"""Which of several failures was the first: pure rules over what the ranks left behind.

A peer that fails because another has failed is a consequence, however early its error was written: it raises
PeerLost, or ends by the agent's signal. Of what is left, an error that a rank wrote itself says more than a
heartbeat that grew old, that more than a death by signal, that more than an early exit. But a heartbeat that
was found to be too old only after another rank had gone without a word is no cause.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONSEQUENCE = "PeerLost:"
TOLD_TO_END = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""How ranks leave that the agent ends after another's failure."""


@dataclass(frozen=True)
class Trace:
    """What one rank left."""

    rank: int
    exit_code: int = 0  # negative: a signal
    error: dict[str, Any] | None = None  # its root_cause.json
    phase: str = ""  # of its last heartbeat
    step: int | None = None
    hung_s: float | None = None  # how old its heartbeat was when the launcher ended it for that
    died_at: float | None = None  # seconds since the epoch, as the launcher saw it
    hung_at: float | None = None  # the same, when it was found to hang
    allowed_s: float | None = None  # how old its heartbeat might have become
    stacks: str = ""  # where its threads stood when it was found to hang

    @property
    def where(self) -> str:
        at = f", step {self.step}" if self.step is not None else ""
        return f"rank {self.rank}, {self.phase or 'before its first heartbeat'}{at}"


def root_cause(traces: Sequence[Trace]) -> dict[str, Any] | None:
    """root_cause.json of the run, its `rank` included; None: nothing failed."""
    own = [trace for trace in traces if _own(trace)]
    if own:
        return _told(min(own, key=lambda trace: float((trace.error or {}).get("wall", 0.0))))
    silent = [trace for trace in traces if trace.error is None]
    hung = [trace for trace in traces if trace.hung_s is not None and not _after_a_death(trace, silent)]
    if hung:
        # The one that came least far: the others may have waited for it.
        first = min(hung, key=lambda trace: (-1 if trace.step is None else trace.step, trace.rank))
        allowed = "" if first.allowed_s is None else f" ({first.phase} allows {first.allowed_s:.0f} s)"
        return _found(first, f"no heartbeat for {first.hung_s:.0f} s{allowed}: it hung, and was ended")
    silent = [trace for trace in silent if trace.hung_s is None]  # the launcher itself killed those that hung
    killed = [trace for trace in silent if trace.exit_code < 0 and trace.exit_code not in TOLD_TO_END]
    if killed:
        first = _earliest(killed)
        return _found(first, f"ended by {_name(-first.exit_code)}")
    early = [trace for trace in silent if trace.exit_code == 0 and trace.phase != "done"]
    if early:
        return _found(early[0], "left with exit status 0 before the run was complete")
    odd = [trace for trace in silent if trace.exit_code not in (0, *TOLD_TO_END)]
    if odd:
        first = _earliest(odd)
        return _found(first, f"left with exit status {first.exit_code} and no word of why")
    rest = [trace for trace in traces if trace.exit_code != 0]
    if not rest:
        return None
    first = _earliest(rest)
    return _told(first) if first.error else _found(first, "ended by SIGTERM, which nobody here sent")


def despite_stop(traces: Sequence[Trace]) -> dict[str, Any] | None:
    """What failed in a run that was asked to stop, if anything did: an error of a rank's own, a hang. All
    other ends are the stop's.
    """
    return root_cause([each for each in traces if each.hung_s is not None or _own(each)])


def _after_a_death(hung: Trace, silent: Sequence[Trace]) -> bool:
    """Whether another rank had gone without a word, and untold, before this one was found to hang."""
    gone = [each for each in silent if each.hung_s is None and each.exit_code not in TOLD_TO_END]
    return any((each.died_at or math.inf) < (hung.hung_at or 0.0) for each in gone if each.phase != "done")


def _own(trace: Trace) -> bool:
    return trace.error is not None and not _of_peer(trace.error)


def _of_peer(error: dict[str, Any]) -> bool:
    return str(error.get("error", "")).startswith(CONSEQUENCE)


def _earliest(traces: Sequence[Trace]) -> Trace:
    return min(traces, key=lambda trace: (trace.died_at or 0.0, trace.rank))


def _told(trace: Trace) -> dict[str, Any]:
    """The rank's own words, which may be of another: what is wrong with a sum is told by all."""
    return {"rank": trace.rank, **(trace.error or {})}


def _found(trace: Trace, what: str) -> dict[str, Any]:
    """What the launcher saw of a rank that said nothing."""
    return {
        "error": f"{trace.where}: {what}",
        "where": f"rank {trace.rank}",
        "traceback": trace.stacks,
        "phase": trace.phase,
        "step": trace.step,
        "known": [],
        "rank": trace.rank,
        "wall": trace.died_at,
    }


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
