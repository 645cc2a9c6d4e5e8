"""The thresholds behind a verdict, which a recipe may set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Rules:
    """Thresholds. A step is late in multiples of its usual time *and* in seconds: both must be passed.

    The weaker the other signs, the longer the patience. `strong` signs are dead threads and a known fatal
    line in the log; `weak` ones an exception (it may have been handled), a full queue (its consumer may only
    be slow), no CPU time at all.
    """

    slow_factor: float = 3.0
    slow_min_s: float = 10.0
    strong_factor: float = 5.0
    strong_min_s: float = 15.0
    weak_factor: float = 10.0
    weak_min_s: float = 60.0
    alone_factor: float = 20.0
    alone_min_s: float = 120.0
    starved_patience: float = 5.0
    """An empty input queue explains a pause: so many times the patience."""
    heartbeat_deadline_s: float = 60.0
    """Where the heartbeat names none."""
    long_phase_s: float = 1800.0
    """Loading or compiling that takes longer is `slow`, though it beats."""
    idle_cpu_share: float = 0.02
    """Less CPU time than this share of the sample is none."""
    log_deadline_s: float = math.inf
    """Without a heartbeat: the log is its heartbeat, and silent for longer it is stale. Only the recipe's
    author knows such a number; without one it is judged by what else there is."""
    quiet_s: float = 60.0
    """Without a heartbeat: a log written to more recently needs no other proof."""
    fatal_quiet_s: float = 30.0
    """Without a heartbeat: a known fatal line, then so much silence without CPU time."""
    busy_quiet_s: float = 600.0
    """Without a heartbeat: it computes but tells no step; that may be an evaluation."""
    quiet_slow_s: float = 300.0
    quiet_wedged_s: float = 1800.0
    fresh_s: float = 10.0
    """Without a heartbeat: so long a silent program is `starting`."""

    @classmethod
    def of(cls, changed: Mapping[str, float]) -> Rules:
        """The usual ones but for these; names that this version does not know are left out."""
        return cls(**{name: value for name, value in changed.items() if name in RULE_NAMES})


RULE_NAMES: tuple[str, ...] = tuple(each.name for each in fields(Rules))
"""What a recipe may set under `observe.rules`."""
