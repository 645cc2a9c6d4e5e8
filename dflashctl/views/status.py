"""How a look at a host is shown: a line a run, the details of one, a line for a changed state, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflashctl.config.rules import Rules
from dflashctl.render import table
from dflashctl.render.hints import complete
from dflashctl.render.text import age, count, duration, line, plural, ranges, size
from dflashctl.runs.alive import deadline
from dflashctl.runs.facts import Hit, Process
from dflashctl.runs.signs import since_step, usual_gap
from dflashctl.runs.status import Look, Row

if TYPE_CHECKING:
    from rich.console import RenderableType

TOLD = ("loss", "tokens_per_s", "acceptance_length")
"""Metrics that a line of a watch tells; the details show all."""
PROCESSES_SHOWN = 8
THREAD_NAMES_SHOWN = 6
COLUMNS = ("TAG", "STATE", "FOR", ">STEP", ">TOK/S", "GPUS", "EVIDENCE")


def title(look: Look) -> str:
    """`lab · 8 GPUs · 1 run`."""
    parts = [look.host]
    if look.gpu_count is not None:
        parts.append(plural(look.gpu_count, "GPU"))
    if look.gpu_problem:
        parts.append(f"GPUs: {look.gpu_problem}")
    if look.contact != "ok":
        parts.append({"lost": "no contact", "frozen": "frozen", "stopped": "stopped"}[look.contact])
    if look.live or look.contact == "ok":
        parts.append(plural(look.live, "run") if look.live else "no live run")
    return " · ".join(parts)


def cells(row: Row) -> list[object]:
    facts, verdict = row.facts, row.verdict
    return [
        line(facts.name),
        table.state(verdict.state),
        lasting(row),
        step(row),
        count(row.tokens_per_s),
        ranges(list(facts.gpu_indices)),
        line("; ".join(verdict.evidence)),
    ]


def lasting(row: Row) -> str:
    """How long a live run has been in its state, `4m12s`; how long ago an ended one ended, `4m12s ago`."""
    since = row.verdict.for_s
    return f"{duration(since)} ago" if row.verdict.ended and since is not None else duration(since)


def step(row: Row) -> str:
    beat = row.facts.heartbeat
    total = beat.total_steps if beat else None
    if row.facts.step is None:
        return "-"
    return count(row.facts.step) + (f"/{count(total)}" if total else "")


def hints(look: Look) -> str:
    """`next: …` of the runs that need something, at most four commands."""
    wanted = [command for row in look.rows for command in row.verdict.next if not _calm(row)]
    wanted = wanted or [command for row in look.rows[:1] for command in row.verdict.next]
    return line("next: " + " · ".join(list(dict.fromkeys(wanted))[:4])) if wanted else ""


def _calm(row: Row) -> bool:
    return row.verdict.state in ("finished", "running")


def overview(look: Look) -> RenderableType:
    """Title, table, hints."""
    from rich.console import Group

    parts: list[RenderableType] = [table.cell(title(look), "bold")]
    if look.rows:
        parts.append(table.table(COLUMNS, [cells(row) for row in look.rows]))
    if look.hidden:
        more = f"{plural(look.hidden, 'more run')} ended lately: dflashctl runs"
        parts.append(table.cell(complete(more), "dim"))
    if not look.rows and look.contact == "ok":
        parts.append(
            table.cell(
                complete("nothing is running, and nothing ended lately: dflashctl launch --tag NAME"), "dim"
            )
        )
    if hints(look):
        parts.append(table.cell(hints(look), "dim"))
    return Group(*parts)


def details(look: Look, row: Row) -> RenderableType:
    """Everything about one run, each fact on its line."""
    from rich.console import Group
    from rich.text import Text

    facts, verdict = row.facts, row.verdict
    known = verdict.for_s is not None
    since = (" " if verdict.ended else " for ") + lasting(row) if known else ""
    head = Text.assemble(
        table.cell(f"{title(look)}\n", "bold"),
        table.cell(line(facts.name), "bold"),
        "  ",
        table.state(verdict.state),
        f"{since} (confidence {verdict.confidence})",
    )
    rows = [("", f"- {each}") for each in verdict.evidence] + fact_lines(row)
    body = table.pairs(rows)
    tail = [table.cell("next: " + " · ".join(verdict.next), "dim")] if verdict.next else []
    return Group(head, body, *tail)


def fact_lines(row: Row) -> list[tuple[str, str]]:
    """Name and words of each fact that there is."""
    facts, verdict = row.facts, row.verdict
    record, beat, steps, log, family = facts.record, facts.heartbeat, facts.steps, facts.log, facts.family
    lines = [("run", facts.id)]
    if record.get("recipe"):
        release = str(record.get("release") or "")[:8]
        variant = f", variant {record['variant']}" if record.get("variant") else ""
        lines.append(("recipe", f"{record['recipe']}{variant}" + (f", release {release}" if release else "")))
    if facts.gpu_indices:
        loads = () if verdict.ended else facts.gpus  # they may be somebody else's by now
        use = [f"{gpu.index}: {_percent(gpu.utilization_pct)}, {_mib(gpu.memory_mib)}" for gpu in loads]
        lines.append(("GPUs", ranges(list(facts.gpu_indices)) + (f" ({'; '.join(use)})" if use else "")))
    if facts.step is not None:
        each = f", {age(steps.median_step_s)} each" if steps and steps.median_step_s else ""
        lines.append(("step", step(row) + each))
    values: dict[str, float] = dict(beat.metrics) if beat else {}
    if steps and steps.loss is not None:
        values.setdefault("loss", steps.loss)
    if values:
        lines.append(("metrics", ", ".join(f"{name} {_figure(value)}" for name, value in values.items())))
    if beat and not verdict.ended:
        allowed = deadline(beat, Rules.of(facts.rules))
        lines.append(
            ("heartbeat", f"{age(beat.age_s)} old in phase {beat.phase}, which allows {age(allowed)}")
        )
    if beat and beat.queues:
        lines.append(
            ("queues", ", ".join(f"{name} {depth}/{full}" for name, (depth, full) in beat.queues.items()))
        )
    if beat and beat.dead_threads:
        lines.append(("threads gone", ", ".join(beat.dead_threads)))
    if not row.verdict.ended and family.count:
        states = " ".join(f"{number}×{state}" for state, number in sorted(family.states.items()))
        spent = f", {family.cpu_s:.1f} s of CPU time in {age(facts.sample_s)}" if facts.sample_s > 0 else ""
        lines.append(
            ("processes", f"{family.count} ({states}), {size(family.rss_bytes)} of main memory{spent}")
        )
        lines += [("", process_words(each)) for each in family.processes[:PROCESSES_SHOWN]]
        if family.count > PROCESSES_SHOWN:
            lines.append(("", f"and {family.count - PROCESSES_SHOWN} smaller ones"))
    if log is not None and log.exists:
        written = f", written {age(log.quiet_s)} ago" if log.quiet_s is not None else ""
        written += f", grew by {size(log.grown)} in {age(facts.sample_s)}" if log.grown else ""
        skipped = f", {size(log.skipped_bytes)} in the middle not searched" if log.skipped_bytes else ""
        lines.append(("log", f"{log.path} ({size(log.size)}{written}{skipped})"))
        if log.last_line and not verdict.ended:
            lines.append(("", f"last line: {log.last_line}"))
    elif log is not None:
        lines.append(("log", f"{log.path} (not there)"))
    return lines


def process_words(process: Process) -> str:
    """`pid 40 python, S in futex_wait_queue, 0.0 s of CPU, 124 GiB, 34 threads: python 30, drafter 4`."""
    where = f" in {process.wchan}" if process.wchan else ""
    said = [f"pid {process.pid} {process.comm}", f"{process.state}{where}", f"{process.cpu_s:.1f} s of CPU"]
    said.append(size(process.rss_bytes))
    ranked = sorted(process.thread_names.items(), key=lambda item: -item[1])
    names = ", ".join(f"{name} {number}" for name, number in ranked[:THREAD_NAMES_SHOWN])
    said.append(plural(process.threads, "thread") + (f": {names}" if len(ranked) > 1 else ""))
    return ", ".join(said)


def change_line(row: Row, clock: str) -> str:
    """For a watch without a terminal: `12:00:03  demo  running  step 118 of 600, 0.2 s each; loss 2.31`."""
    said = list(row.verdict.evidence[: 1 if row.verdict.state == "running" else 3])
    beat = row.facts.heartbeat
    if beat and beat.phase == "training" and not row.verdict.ended:
        said += [f"{name} {_figure(beat.metrics[name])}" for name in TOLD if name in beat.metrics]
    return line(f"{clock}  {row.facts.name}  {row.verdict.state}  {'; '.join(said)}")


def document(look: Look) -> dict[str, Any]:
    """A host in schema dflashctl.status/1."""
    return {
        "host": look.host,
        "contact": look.contact,
        "gpus": look.gpu_count,
        "gpu_problem": look.gpu_problem or None,
        "hidden": look.hidden,
        "runs": [run_document(row) for row in look.rows],
    }


def run_document(row: Row) -> dict[str, Any]:
    facts, verdict = row.facts, row.verdict
    beat, log, ending = facts.heartbeat, facts.log, facts.ending
    record: Mapping[str, Any] = facts.record
    return {
        "id": facts.id,
        "tag": facts.tag or None,
        "state": verdict.state,
        "confidence": verdict.confidence,
        "for_s": None if verdict.ended else _rounded(verdict.for_s),
        "ended_ago_s": _rounded(verdict.for_s) if verdict.ended else None,
        "started_ago_s": _rounded(facts.started_age_s),
        "evidence": list(verdict.evidence),
        "next": list(verdict.next),
        "step": facts.step,
        "total_steps": beat.total_steps if beat else None,
        "phase": beat.phase if beat else None,
        "heartbeat_age_s": beat.age_s if beat else None,
        "heartbeat_deadline_s": deadline(beat, Rules.of(facts.rules)) if beat else None,
        "step_age_s": None if verdict.ended else since_step(facts),
        "usual_step_s": usual_gap(facts),
        "tokens_per_s": row.tokens_per_s,
        "metrics": dict(beat.metrics) if beat else {},
        "gpus": list(facts.gpu_indices),
        "recipe": record.get("recipe"),
        "release": record.get("release"),
        "log": log.path if log else None,
        "exceptions": log.exceptions if log else None,
        "first_exception": _hit(log.first_exception) if log else None,
        "known_failures": [hit.name for hit in log.known] if log else [],
        "known_lines": [_hit(hit) for hit in log.known] if log else [],
        "log_grown_bytes": log.grown if log else None,
        "last_line": log.last_line or None if log else None,
        "queues": {name: {"depth": depth, "size": full} for name, (depth, full) in beat.queues.items()}
        if beat
        else {},
        "dead_threads": list(beat.dead_threads) if beat else [],
        "gpu_load": [
            {"index": gpu.index, "utilization_pct": gpu.utilization_pct, "memory_mib": gpu.memory_mib}
            for gpu in facts.gpus
        ],
        "sample_s": facts.sample_s,
        "cpu_s": facts.family.cpu_s,
        "process_list": [dict(vars(each)) for each in facts.family.processes],
        "processes": facts.family.count,
        "rss_bytes": facts.family.rss_bytes,
        "headline": facts.headline or None,
        "exit": None
        if ending is None
        else {"cause": ending.cause, "code": ending.code, "signal": ending.signal, "oom": ending.oom},
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _hit(hit: Hit | None) -> dict[str, Any] | None:
    if hit is None:
        return None
    return {"name": hit.name or None, "line": hit.line, "count": hit.count, "text": hit.text}


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: int | None) -> str:
    return "? %" if value is None else f"{value} %"


def _mib(value: int | None) -> str:
    return "? MiB" if value is None else f"{value:,} MiB"
