"""The agent's answer as checked values: what `verdict` judges. Ages in seconds, by the container's clocks.

The answer holds what a program wrote into its files, so nothing in it is trusted to have the right type: a
wrong one is as good as absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Contact = Literal["ok", "lost", "frozen", "stopped"]


@dataclass(frozen=True)
class Heartbeat:
    """The program's own word. `age_s` by CLOCK_MONOTONIC, so a clock that was set does not matter."""

    phase: str
    age_s: float
    phase_age_s: float | None = None
    deadline_s: float | None = None
    step: int | None = None
    total_steps: int | None = None
    median_step_s: float | None = None
    queues: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # name -> (depth, size)
    dead_threads: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    """Names of metrics that are NaN or infinite."""


@dataclass(frozen=True)
class Steps:
    """The history of reported steps."""

    last_step: int
    age_s: float
    """Since the last report."""
    median_step_s: float | None = None
    gap_s: float | None = None
    """Usual time between two reports."""
    recent_step_s: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class Hit:
    """A line of the log. `line` counts from 1 in the whole file; None when it could not be counted."""

    text: str
    line: int | None = None
    name: str = ""
    """Of the table of known failures; empty for any other exception."""
    count: int = 1
    fatal: bool = False
    """A known failure that the process or thread which printed it does not survive."""


@dataclass(frozen=True)
class Log:
    path: str = ""
    exists: bool = True
    size: int | None = None
    grown: int | None = None
    """Bytes during the sample."""
    quiet_s: float | None = None
    """Since the last write."""
    exceptions: int = 0
    first_exception: Hit | None = None
    known: tuple[Hit, ...] = ()
    step: int | None = None
    last_line: str = ""
    skipped_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Process:
    pid: int
    comm: str
    state: str
    wchan: str = ""
    cpu_s: float = 0.0
    rss_bytes: int = 0
    threads: int = 1
    thread_names: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """All processes of the run but its supervisor."""

    count: int = 0
    cpu_s: float = 0.0
    """CPU seconds spent during the sample, all together."""
    rss_bytes: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True)
class Ending:
    """exit.json."""

    cause: str
    code: int | None = None
    signal: int | None = None
    oom: bool = False
    oom_kills: int | None = None
    """OOM kills that the container's memory cgroup counted during the run; None: nobody counted."""
    oom_kills_machine: int | None = None
    """The same of the whole machine, whoever was hit."""
    wall_s: float | None = None
    age_s: float | None = None
    peak_rss_bytes: int | None = None
    killed_by: str = ""
    reason: str = ""
    why: str = ""


@dataclass(frozen=True)
class KnownCause:
    """A known failure by which the program itself explains its end (root_cause.json, `known`)."""

    name: str
    meaning: str
    torch: str = "any"
    do: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuUse:
    index: int
    utilization_pct: int | None
    memory_mib: int | None


@dataclass(frozen=True)
class RunFacts:
    """Everything known about one run at one moment."""

    id: str
    tag: str = ""
    contact: Contact = "ok"
    contact_detail: str = ""
    """Why there is no contact."""
    last_seen: str = ""
    """The state at the last contact, in words."""
    last_seen_age_s: float | None = None
    recorded: bool = True
    """There is a readable record.json."""
    problems: tuple[str, ...] = ()
    created_age_s: float | None = None
    started_age_s: float | None = None
    started_within_s: float = 60.0
    queued: bool = False
    cancelled: bool = False
    rebooted: bool = False
    supervisor_recorded: bool = True
    supervisor_alive: bool = True
    leader_alive: bool = True
    ending: Ending | None = None
    root_cause: str = ""
    root_cause_known: tuple[KnownCause, ...] = ()
    headline: str = ""
    heartbeat: Heartbeat | None = None
    steps: Steps | None = None
    step_seen_age_s: float | None = None
    """A watcher has seen the present step for so long."""
    log: Log | None = None
    family: Family = field(default_factory=Family)
    sample_s: float = 0.0
    step_regex: bool = False
    announced: str = ""
    """The log's last line, where the recipe says that such a line announces a long silence."""
    rules: Mapping[str, float] = field(default_factory=dict)
    """Thresholds of the recipe."""
    kill_requested_age_s: float | None = None
    gpu_indices: tuple[int, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What a person types: the tag, or the id where the record is damaged."""
        return self.tag or self.id

    @property
    def step(self) -> int | None:
        """The last step that anything told of."""
        found = [
            self.heartbeat.step if self.heartbeat else None,
            self.steps.last_step if self.steps else None,
            self.log.step if self.log else None,
        ]
        return max((each for each in found if each is not None), default=None)


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def since(now: Any, then: Any) -> float | None:
    """now - then, not below zero; None when either is missing."""
    a, b = number(now), number(then)
    return None if a is None or b is None else max(a - b, 0.0)
