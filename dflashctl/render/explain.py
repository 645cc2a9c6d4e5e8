"""How known failures are told: the log's line, what it means, what helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflashctl.render import table
from dflashctl.render.text import line, plural, size
from dflashctl.runs import known
from dflashctl.runs.facts import Hit
from dflashctl.runs.signs import known_hits
from dflashctl.runs.status import Row

if TYPE_CHECKING:
    from rich.console import RenderableType


def explanation(row: Row) -> RenderableType:
    """All matches, fatal ones first; without any, the first exception."""
    from rich.console import Group

    facts, log = row.facts, row.facts.log
    parts: list[RenderableType] = [table.cell(line(f"{facts.name} · {row.verdict.state}"), "bold")]
    if log is None or not log.exists:
        parts.append(
            table.cell(f"there is no log to look into{f' ({log.problem})' if log and log.problem else ''}")
        )
        return Group(*parts)
    for hit in known_hits(facts):
        parts.append(table.pairs(_lines(hit)))
    if not log.known:
        parts.append(table.cell("no line of the log matches the table of known failures"))
        if log.first_exception is not None:
            first = log.first_exception
            parts.append(table.pairs([("first exception", _where(first)), ("", first.text)]))
    more = f"; {size(log.skipped_bytes)} in the middle not searched" if log.skipped_bytes else ""
    parts.append(table.cell(f"{log.path}: {plural(log.exceptions, 'exception')}{more}", "dim"))
    return Group(*parts)


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
    first = log.first_exception if log else None
    return {
        "id": row.facts.id,
        "tag": row.facts.tag or None,
        "state": row.verdict.state,
        "log": log.path if log else None,
        "exceptions": log.exceptions if log else None,
        "first_exception": {"line": first.line, "text": first.text} if first else None,
        "skipped_bytes": log.skipped_bytes if log else None,
        "matches": matches,
    }
