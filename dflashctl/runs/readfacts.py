"""From the JSON of operation `observe` (dflashctl/agent/runs/runfacts.py) to RunFacts. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from dflashctl.render.secrets import hide
from dflashctl.runs import known
from dflashctl.runs.facts import (
    Ending,
    Family,
    Heartbeat,
    Hit,
    KnownCause,
    Log,
    Process,
    RunFacts,
    Steps,
    listed,
    mapping,
    number,
    since,
    text,
    whole,
)


def read_answer(answer: Mapping[str, Any]) -> list[RunFacts]:
    """All runs of an answer, newest first."""
    now = mapping(answer.get("now"))
    sample_s = number(answer.get("sample_s")) or 0.0
    return [read_run(mapping(run), now, sample_s) for run in listed(answer.get("runs"))]


def read_run(run: Mapping[str, Any], now: Mapping[str, Any], sample_s: float = 0.0) -> RunFacts:
    """One run. `now` are the container's clocks at the time of the answer."""
    record = mapping(run.get("record"))
    hide(record.get("secrets"))  # a program may have printed them
    events = mapping(run.get("events"))
    observed = mapping(record.get("observe"))
    rules = {name: number(value) for name, value in mapping(observed.get("rules")).items()}
    heartbeat = read_heartbeat(mapping(run.get("heartbeat")), now)
    problems = [text(each) for each in listed(run.get("problems"))]
    if text(run.get("heartbeat_problem")):
        problems.append(text(run.get("heartbeat_problem")))
    summary, root_cause = mapping(run.get("summary")), mapping(run.get("root_cause"))
    gpus = [whole(mapping(each).get("index")) for each in listed(record.get("gpus"))]
    return RunFacts(
        id=text(run.get("id")),
        tag=text(record.get("tag")),
        recorded=bool(record),
        problems=tuple(each for each in problems if each),
        created_age_s=since(now.get("wall"), record.get("created_at")),
        started_age_s=since(now.get("wall"), run.get("started_at")),
        started_within_s=number(record.get("started_within_s")) or 60.0,
        queued=bool(events) and not (set(events) - {"queued"}),
        cancelled="cancelled" in events,
        rebooted=run.get("rebooted") is True,
        supervisor_recorded=run.get("supervisor_recorded") is True,
        supervisor_alive=run.get("supervisor_alive") is True,
        leader_alive=run.get("leader_alive") is True,
        ending=read_ending(mapping(run.get("exit")), now),
        root_cause=_root_cause(root_cause),
        root_cause_known=_known_causes(root_cause),
        headline=text(summary.get("headline")),
        heartbeat=heartbeat,
        steps=read_steps(mapping(run.get("metrics")), mapping(run.get("heartbeat")), now),
        log=read_log(mapping(run.get("log")), now),
        family=read_family(mapping(run.get("family"))),
        sample_s=sample_s,
        step_regex=bool(observed.get("step_regex")),
        announced=announced(
            text(observed.get("pause_regex")), text(mapping(run.get("log")).get("last_line"))
        ),
        rules={name: value for name, value in rules.items() if value is not None and value > 0},
        kill_requested_age_s=since(now.get("wall"), mapping(events.get("kill_requested")).get("at")),
        gpu_indices=tuple(index for index in gpus if index is not None),
        record=record,
    )


def read_heartbeat(beat: Mapping[str, Any], now: Mapping[str, Any]) -> Heartbeat | None:
    """None without a phase or a time: then it says nothing."""
    phase, age = text(beat.get("phase")), since(now.get("mono"), beat.get("mono"))
    if not phase or age is None:
        return None
    queues = {}
    for name, queue in mapping(beat.get("queues")).items():
        depth, size = whole(mapping(queue).get("depth")), whole(mapping(queue).get("size"))
        if depth is not None and size is not None:
            queues[name] = (depth, size)
    raw = mapping(beat.get("metrics"))
    metrics = {name: number(value) for name, value in raw.items()}
    return Heartbeat(
        phase=phase,
        age_s=age,
        phase_age_s=since(now.get("mono"), beat.get("phase_since")),
        deadline_s=number(beat.get("deadline_s")),
        step=whole(beat.get("step")),
        total_steps=whole(beat.get("total_steps")),
        median_step_s=number(beat.get("median_step_s")),
        queues=queues,
        dead_threads=tuple(
            sorted(name for name, alive in mapping(beat.get("threads")).items() if alive is False)
        ),
        metrics={name: value for name, value in metrics.items() if value is not None},
        not_finite=tuple(sorted(name for name, value in raw.items() if _not_finite(value))),
    )


def read_steps(metrics: Mapping[str, Any], beat: Mapping[str, Any], now: Mapping[str, Any]) -> Steps | None:
    """A report carries wall time alone. The heartbeat, which has both clocks of the same program, puts it on
    the monotonic one, so that a clock set since then makes no false pause."""
    last = mapping(metrics.get("last"))
    step, wall = whole(last.get("step")), number(last.get("wall"))
    if step is None or wall is None:
        return None
    beat_wall, beat_mono = number(beat.get("wall")), number(beat.get("mono"))
    if beat_wall is not None and beat_mono is not None:
        age = since(now.get("mono"), wall - beat_wall + beat_mono)
    else:
        age = since(now.get("wall"), wall)
    return Steps(
        last_step=step,
        age_s=age or 0.0,
        median_step_s=number(metrics.get("median_step_s")),
        gap_s=number(metrics.get("gap_s")),
        recent_step_s=number(metrics.get("recent_step_s")),
        loss=number(last.get("loss")),
        tokens_per_s=number(last.get("tokens_per_s")),
    )


def read_log(log: Mapping[str, Any], now: Mapping[str, Any]) -> Log | None:
    if not log:
        return None
    rows = known.by_name()
    hits = [_hit(mapping(hit), name) for name, hit in mapping(log.get("known")).items() if name in rows]
    first = mapping(log.get("first_exception"))
    return Log(
        path=text(log.get("path")),
        exists=log.get("exists") is True,
        size=whole(log.get("size")),
        grown=whole(log.get("grown")),
        quiet_s=since(now.get("wall"), log.get("mtime")),
        exceptions=max(whole(log.get("exceptions")) or 0, 0),
        first_exception=_hit(first, "") if first else None,
        known=tuple(sorted(hits, key=lambda hit: (hit.line is None, hit.line))),
        step=whole(log.get("step")),
        last_line=text(log.get("last_line")),
        skipped_bytes=whole(log.get("skipped_bytes")) or 0,
        problem=text(log.get("problem")),
    )


def announced(pattern: str, last_line: str) -> str:
    """The line, where the recipe's `pause_regex` finds something in it. A pattern of a damaged record that is
    none finds nothing."""
    try:
        return last_line if pattern and re.search(pattern, last_line) else ""
    except re.error:
        return ""


def read_family(family: Mapping[str, Any]) -> Family:
    states = {name: whole(count) or 0 for name, count in mapping(family.get("states")).items()}
    return Family(
        count=whole(family.get("count")) or 0,
        cpu_s=number(family.get("cpu_s")) or 0.0,
        rss_bytes=whole(family.get("rss_bytes")) or 0,
        states=states,
        processes=tuple(
            Process(
                pid=whole(each.get("pid")) or 0,
                comm=text(each.get("comm")),
                state=text(each.get("state")),
                wchan=text(each.get("wchan")),
                cpu_s=number(each.get("cpu_s")) or 0.0,
                rss_bytes=whole(each.get("rss_bytes")) or 0,
                threads=whole(each.get("threads")) or 1,
                thread_names={
                    name: whole(count) or 0 for name, count in mapping(each.get("thread_names")).items()
                },
            )
            for each in map(mapping, listed(family.get("processes")))
        ),
    )


def read_ending(ending: Mapping[str, Any], now: Mapping[str, Any]) -> Ending | None:
    if not ending:
        return None
    by, kills = mapping(ending.get("killed_by")), mapping(ending.get("oom_kills"))
    return Ending(
        cause=text(ending.get("cause")),
        code=whole(ending.get("code")),
        signal=whole(ending.get("signal")),
        oom=ending.get("oom") is True,
        oom_kills=whole(kills.get("container")),
        oom_kills_machine=whole(kills.get("machine")),
        wall_s=number(ending.get("wall_s")),
        age_s=since(now.get("wall"), ending.get("ended_at")),
        peak_rss_bytes=whole(ending.get("peak_rss_bytes")),
        killed_by=text(by.get("who")),
        reason=text(by.get("reason")),
        why=text(ending.get("why")),
    )


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _root_cause(cause: Mapping[str, Any]) -> str:
    """ "ValueError: ... at file:line", as far as it is there; of a longer message the first line."""
    error, where = next(iter(text(cause.get("error")).splitlines()), ""), text(cause.get("where"))
    return f"{error} at {where}" if error and where else error


def _known_causes(cause: Mapping[str, Any]) -> tuple[KnownCause, ...]:
    """As the program wrote them: its table may be newer than the one here."""
    return tuple(
        KnownCause(
            text(each.get("name")),
            text(each.get("meaning")),
            text(each.get("torch")) or "any",
            tuple(text(word) for word in listed(each.get("do")) if text(word)),
        )
        for each in map(mapping, listed(cause.get("known")))
        if text(each.get("name"))
    )


def _hit(hit: Mapping[str, Any], name: str) -> Hit:
    row = known.by_name().get(name)
    return Hit(
        text=text(hit.get("text")),
        line=whole(hit.get("line")),
        name=name,
        count=whole(hit.get("count")) or 1,
        fatal=row is not None and row.severity == "fatal",
    )
