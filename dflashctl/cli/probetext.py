"""What `probe` prints while its programs run and when they have ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dflashctl.cli.eachhost import Outcome
from dflashctl.cli.launchtext import show_plan
from dflashctl.cli.waitline import wait_line
from dflashctl.errors import RunBad
from dflashctl.probe import tables
from dflashctl.probe.plan import Work
from dflashctl.probe.running import Started, watch
from dflashctl.probe.verdict import Verdict, error_of, judge, torch_of
from dflashctl.remote.engine import Engine
from dflashctl.render.table import cell, say, show, table, warn
from dflashctl.render.text import block, plural
from dflashctl.runs.ending import end_words, failed

MARKS = {"DIFFERS": "bold red", "as expected": "dim"}


def show_dry_run(work: Work, started: Started, *, json: bool) -> Outcome:
    """--dry-run: the run that it would be, and its programs."""
    shown = show_plan(started.plan, quiet=json)
    cases = [each.name for each in work.cases]
    if not json:
        say(f"its programs, {work.deadline_s:g} s each at the most: {', '.join(cases)}")
    return Outcome({**shown, "cases": cases, "deadline_s": work.deadline_s})


def announce(engine: Engine, work: Work, started: Started, *, json: bool) -> None:
    """Who runs where."""
    if started.note:
        warn(f"note: {started.note}")
    if not json:
        where = f"GPU {started.plan.gpu_words}" if started.plan.record["gpus"] else "no GPU"
        say(f"{engine.host.name} · {work.tag} · run {started.plan.run_id} · {where}")


def ask_probe(engine: Engine, work: Work, started: Started, *, json: bool) -> Outcome:
    """The matrix: a line on the terminal for what runs, then the table."""
    assert work.probe is not None
    name = work.probe.name
    done: list[str] = []
    with wait_line(not json) as wait:
        wait("looking at torch")

        def heard(line: Mapping[str, Any]) -> None:
            if line.get("state") == "began":
                wait(f"{line['case']} ({len(done)} of {len(work.cases)} done)")
            elif "case" in line:
                done.append(str(line["case"]))

        watched = watch(engine, started.plan, work, on_line=heard)
    seen = torch_of(watched.lines)
    verdicts = [judge(name, case, watched.lines, seen.get("torch"), work.deadline_s) for case in work.cases]
    if not json:
        _show(verdicts, seen)
        if not any("look" in line for line in watched.lines):
            say(watched.end.log_tail, file=sys.stderr)
    document = {**_run(engine, work, started, watched.end.exit), **tables.documents(verdicts, seen)}
    return Outcome(document, error_of(verdicts, host=engine.host.name, tag=work.tag))


def _show(verdicts: list[Verdict], seen: Mapping[str, Any]) -> None:
    if seen:
        gpus = plural(int(seen.get("gpus", 0)), "GPU")
        say(f"torch {seen.get('torch', '?')} · Python {seen.get('python', '?')} · torch sees {gpus}")
    rows = []
    for verdict in verdicts:
        name, answer, wanted, mark, *rest = tables.row(verdict)
        style = tables.STYLES.get(verdict.answer, "dim")
        rows.append((name, cell(answer, style), wanted, cell(mark, MARKS.get(mark, "")), *rest))
    show(table(tables.COLUMNS, rows))
    for verdict in verdicts:
        for words in tables.details(verdict):
            say(f"  {words}")


def ask_file(engine: Engine, work: Work, started: Started, *, json: bool) -> Outcome:
    """A person's program: its output as it comes."""

    def heard(text: str) -> None:
        sys.stdout.write(block(text))
        sys.stdout.flush()

    watched = watch(engine, started.plan, work, on_log=None if json else heard)
    end, exit = watched.end, watched.end.exit
    document = {**_run(engine, work, started, exit), "log_tail": end.log_tail}
    words = end.problem or end_words(exit or {})
    last = next((line for line in watched.lines if line.get("state") == "ended"), {})
    if last.get("timed_out"):
        words = f"was not done within {work.deadline_s:g} s and was killed; its log has the stacks"
    if failed(exit):
        return Outcome(
            document,
            RunBad(f"{work.tag} {words}", where=engine.host.name, next=f"dflashctl logs {work.tag}"),
        )
    if not json:
        say(f"{work.tag} finished: {words}")
    return Outcome(document)


def _run(engine: Engine, work: Work, started: Started, exit: Mapping[str, Any] | None) -> dict[str, Any]:
    assert started.answer is not None
    record = started.plan.record
    return {
        "host": engine.host.name,
        "run": started.plan.run_id,
        "tag": work.tag,
        "probe": work.probe.name if work.probe else None,
        "gpus": record["gpus"],
        "log": started.answer["log"],
        "note": started.note,
        "exit": exit,
    }
