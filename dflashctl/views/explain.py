"""How known failures are told: the log's line, what it means, what helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflashctl.render import table
from dflashctl.render.text import line, plural, size
from dflashctl.runs import known
from dflashctl.runs.facts import Hit, KnownCause, RunFacts
from dflashctl.runs.signs import known_hits
from dflashctl.runs.status import Row

if TYPE_CHECKING:
    from rich.console import RenderableType


def explanation(row: Row) -> RenderableType:
    """All matches, fatal ones first; without any, the run's own root cause and the first exception."""
    from rich.console import Group

    facts, log = row.facts, row.facts.log
    parts: list[RenderableType] = [table.cell(line(f"{facts.name} · {row.verdict.state}"), "bold")]
    if log is None or not log.exists:
        parts.append(
            table.cell(f"there is no log to look into{f' ({log.problem})' if log and log.problem else ''}")
        )
        told = [_cause_lines(cause, facts) for cause in facts.root_cause_known] or [_died_of(facts)]
        return Group(*parts, *(table.pairs(lines) for lines in told if lines))
    for hit in known_hits(facts):
        parts.append(table.pairs(_lines(hit)))
    causes = _only_in_cause(facts)
    parts += [table.pairs(_cause_lines(cause, facts)) for cause in causes]
    if not log.known and not causes:
        parts.append(table.cell("no line of the log matches the table of known failures"))
        if died_of := _died_of(facts):
            parts.append(table.pairs(died_of))
        if log.first_exception is not None:
            first = log.first_exception
            parts.append(table.pairs([("first exception", _where(first)), ("", first.text)]))
    more = f"; {size(log.skipped_bytes)} in the middle not searched" if log.skipped_bytes else ""
    parts.append(table.cell(f"{log.path}: {plural(log.exceptions, 'exception')}{more}", "dim"))
    return Group(*parts)


def _died_of(facts: RunFacts) -> list[tuple[str, str]]:
    """Not known to others, and yet said: a recipe that was refused, or an exception of the run's own."""
    return [("root cause", facts.root_cause)] if facts.root_cause else []


def _lines(hit: Hit) -> list[tuple[str, str]]:
    row = known.by_name()[hit.name]
    times = f", {hit.count:,} times" if hit.count > 1 else ""
    lines = [
        (row.name, f"{_where(hit)}{times}: {hit.text}"),
        ("means", row.meaning),
        ("torch", row.torch),
        ("do", row.do[0]),
    ]
    lines += [("", each) for each in row.do[1:]]
    if row.see:
        lines.append(("see", ", ".join(row.see)))
    return lines


def _only_in_cause(facts: RunFacts) -> list[KnownCause]:
    """Known failures that the program names as its cause and that no line of the log shows."""
    shown = {hit.name for hit in known_hits(facts)}
    return [cause for cause in facts.root_cause_known if cause.name not in shown]


def _cause_lines(cause: KnownCause, facts: RunFacts) -> list[tuple[str, str]]:
    """As `_lines`, in the program's own words: its table may be another than the one here."""
    lines = [
        (cause.name, f"root cause: {facts.root_cause}"),
        ("means", cause.meaning),
        ("torch", cause.torch),
    ]
    return [*lines, *(("" if number else "do", each) for number, each in enumerate(cause.do))]


def _where(hit: Hit) -> str:
    return "line ?" if hit.line is None else f"line {hit.line:,}"


def document(row: Row) -> dict[str, Any]:
    """Schema dflashctl.explain/1, without the host."""
    log = row.facts.log
    matches = []
    for hit in known_hits(row.facts):
        failure = known.by_name()[hit.name]
        matches.append(
            {
                "name": hit.name,
                "severity": failure.severity,
                "line": hit.line,
                "count": hit.count,
                "text": hit.text,
                "meaning": failure.meaning,
                "torch": failure.torch,
                "do": list(failure.do),
                "see": list(failure.see),
            }
        )
    for cause in _only_in_cause(row.facts):
        where = {"severity": "fatal", "line": None, "count": 1, "text": row.facts.root_cause}
        matches.append({**vars(cause), **where, "do": list(cause.do), "see": []})
    first = log.first_exception if log else None
    return {
        "id": row.facts.id,
        "tag": row.facts.tag or None,
        "state": row.verdict.state,
        "log": log.path if log else None,
        "exceptions": log.exceptions if log else None,
        "root_cause": row.facts.root_cause or None,
        "first_exception": {"line": first.line, "text": first.text} if first else None,
        "skipped_bytes": log.skipped_bytes if log else None,
        "matches": matches,
    }
