"""The report of `dflashctl doctor` for people: a line a check, meaning and mend below where they matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflashctl.render.hints import complete
from dflashctl.render.table import cell, say, show
from dflashctl.render.text import block, duration, line, plural

if TYPE_CHECKING:
    from rich.table import Table

    from dflashctl.doctor.checks import Report
    from dflashctl.doctor.findings import Line

MANY = 4
"""So many checks that are not known for one reason are told in one line, below the others."""
STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red", "not known": "cyan"}


def print_report(host: str, report: Report, took_s: float) -> None:
    """The whole report on stdout."""
    say(f"{host} · {plural(len(report.lines), 'check')} in {duration(took_s)}")
    show(_table(report))
    for text in [*folded(report), *left_out(report)]:
        say(text, "dim")
    say(summary(report))


def _table(report: Report) -> Table:
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    group, many = "", _shared(report)
    for each in report.lines:
        if _reason(each) in many:
            continue
        if each.group != group:
            group = each.group
            made.add_row(cell(group, "bold"))
        made.add_row(cell(f"  {each.status}", STYLES[each.status]), cell(each.name), cell(words(each)))
    return made


def words(each: Line) -> str:
    """What was found, what it means, how to mend it: a line each."""
    rows = [line(each.found)]
    if each.means:
        rows.append(f"means: {line(each.means)}")
    if each.mend:
        rows.append(f"mend:  {line(each.mend)}")
    return block(complete("\n".join(rows)))


def _reason(each: Line) -> str:
    """Why nothing is known, of a line that says nothing else."""
    return each.found if each.status == "not known" and not (each.means or each.mend) else ""


def _shared(report: Report) -> dict[str, list[str]]:
    """The checks of each reason that many have: where there is no connection, the one line that says why
    would be lost among thirty that do not."""
    names: dict[str, list[str]] = {}
    for each in report.lines:
        if _reason(each):
            names.setdefault(each.found, []).append(each.name)
    return {why: found for why, found in names.items() if len(found) >= MANY}


def folded(report: Report) -> list[str]:
    return [
        f"not known ({line(complete(why))}): {', '.join(names)}" for why, names in _shared(report).items()
    ]


def left_out(report: Report) -> list[str]:
    """The checks that make no sense here, by reason."""
    reasons = dict.fromkeys(why for _, why in report.left_out)
    return [
        f"left out ({why}): {', '.join(name for name, each in report.left_out if each == why)}"
        for why in reasons
    ]


def summary(report: Report) -> str:
    """2 failures, 1 warning, 3 not known, 27 ok."""
    counts = [
        plural(len(report.of("failure")), "failure"),
        plural(len(report.of("warning")), "warning"),
        f"{len(report.of('not known'))} not known",
        f"{len(report.of('ok'))} ok",
    ]
    return ", ".join(text for text in counts if not text.startswith("0 ")) or "nothing was checked"
