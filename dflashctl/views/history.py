"""How the history is shown: a line a run; one run with what was learnt; JSON."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflashctl.history.listing import Entry, History, Shown
from dflashctl.render import table
from dflashctl.render.hints import complete
from dflashctl.render.text import clip, duration, line, plural, ranges, size
from dflashctl.runs.ending import signal_name
from dflashctl.runs.facts import listed, mapping, number, text

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("TAG", "STATE", "EXIT", "LAUNCHED", ">TOOK", ">BEST", "CODE", "ID", "LEARNT")


def overview(history: History) -> RenderableType:
    """The list, and which records are damaged."""
    from rich.console import Group

    shown = len(history.entries)
    words = plural(history.total, "run")
    if history.wanted:
        words += line(f", {shown or 'none'} {history.wanted}")
    elif shown < history.total:
        words += f", the newest {shown}"
    parts: list[RenderableType] = [table.cell(f"{history.host} · {words}", "bold")]
    if history.entries:
        parts.append(table.table(COLUMNS, [cells(entry) for entry in history.entries]))
    for run_id, problem in history.damaged:
        parts.append(table.cell(line(f"damaged: {run_id}: {problem}"), "yellow"))
    if history.damaged:
        parts.append(table.cell(complete("next: dflashctl runs repair --dry-run"), "dim"))
    return Group(*parts)


def cells(entry: Entry) -> list[object]:
    return [
        line(entry.facts.tag or "?"),
        table.state(entry.verdict.state),
        exit_word(entry),
        moment(entry.created_at),
        duration(entry.took_s),
        best(entry),
        entry.code,
        # The end of the id is enough for `runs show`, and says that ids are accepted.
        entry.facts.id.rpartition("-")[2],
        learnt(entry),
    ]


def exit_word(entry: Entry) -> str:
    """`0`, `SIGKILL`, `OOM`: the exit code, or the signal that ended it; "-" for a run without one."""
    ending = entry.facts.ending
    if ending is None:
        return "-"
    if ending.oom:
        return "OOM"
    if ending.signal is not None:
        return signal_name(ending.signal)
    return "-" if ending.code is None else str(ending.code)


def best(entry: Entry) -> str:
    """The best acceptance length that it measured."""
    return "-" if entry.best_acceptance_length is None else f"{entry.best_acceptance_length:.2f}"


def learnt(entry: Entry) -> str:
    """What a person noted, else the program's headline, else why it ended as it did."""
    if entry.note:
        return clip(entry.note, 120)
    if entry.facts.headline:
        return line(entry.facts.headline)
    if entry.verdict.state == "failed" and entry.facts.root_cause:
        return clip(entry.facts.root_cause, 120)
    return clip(entry.verdict.evidence[0], 120)


def moment(at: float | None) -> str:
    """Local time, to the minute."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def one(shown: Shown) -> RenderableType:
    """Record, ending, and what was learnt."""
    from rich.console import Group

    entry, detail = shown.entry, shown.detail
    facts, verdict = entry.facts, entry.verdict
    head = table.cell(line(f"{shown.host} · {facts.name} · {verdict.state}"), "bold")
    said = [each for each in verdict.evidence if each != facts.headline]  # it has its own line below
    told = [("" if number else "evidence", each) for number, each in enumerate(said)]
    parts: list[RenderableType] = [head, table.pairs(record_lines(shown) + told)]
    summary = mapping(detail.get("summary"))
    if summary:
        parts += summary_parts(summary)
    for cause in facts.root_cause_known:
        done = [("" if number else "do", each) for number, each in enumerate(cause.do)]
        parts.append(table.pairs([(f"known {cause.name}", cause.meaning), *done]))
    for note in map(mapping, listed(detail.get("notes"))):
        by = f"{moment(number(note.get('at')))} {note.get('by')}"
        parts.append(table.cell(line(f"note ({by}): {note.get('text')}")))
    if verdict.next and verdict.state != "finished":
        parts.append(table.cell("next: " + " · ".join(verdict.next), "dim"))
    return Group(*parts)


def record_lines(shown: Shown) -> list[tuple[str, str]]:
    """What was launched, by whom, with which code."""
    entry, record = shown.entry, mapping(shown.detail.get("record"))
    facts = entry.facts
    ending = facts.ending
    lines = [("run", facts.id)]
    if record.get("recipe"):
        variant = f", variant {record['variant']}" if record.get("variant") else ""
        lines.append(("recipe", f"{record['recipe']}{variant}"))
    lines.append(("code", entry.code))
    by = f" by {record['created_by']}" if record.get("created_by") else ""
    lines.append(("launched", f"{moment(entry.created_at)}{by}"))
    if entry.took_s is not None:
        lines.append(("took", duration(entry.took_s)))
    if record.get("command"):
        lines.append(("command", command_line(record)))
    if facts.gpu_indices:
        lines.append(("GPUs", ranges(list(facts.gpu_indices))))
    if ending is not None and ending.peak_rss_bytes:
        lines.append(("memory", f"at most {size(ending.peak_rss_bytes)}"))
    if facts.log is not None and facts.log.path:
        lines.append(("log", facts.log.path + ("" if facts.log.exists else " (not there)")))
    return lines


def code(shown: Shown) -> RenderableType:
    """The identity of what ran: release, git, and each file with its sha256."""
    from rich.console import Group

    entry, files = shown.entry, shown.detail.get("files")
    record = entry.facts.record
    head = [("release", text(record.get("release")) or "none"), ("code", entry.code)]
    parts: list[RenderableType] = [table.cell(line(f"{entry.facts.name} · code"), "bold"), table.pairs(head)]
    if isinstance(files, Mapping):
        parts.append(table.pairs([(text(digest)[:12], path) for path, digest in sorted(files.items())]))
    elif record.get("release"):
        parts.append(table.cell("the release is gone from the host: its files are not known any more"))
    return Group(*parts)


def noted(answer: Mapping[str, Any]) -> RenderableType:
    return table.cell(line(f"noted on {answer.get('tag')} ({answer.get('id')})"))


def pruned(answer: Mapping[str, Any], *, dry_run: bool) -> RenderableType:
    """What a prune took, or would take."""
    from rich.console import Group

    rows = [mapping(each) for each in listed(answer.get("pruned"))]
    total = sum(number(row.get("bytes")) or 0.0 for row in rows)
    did = "would remove" if dry_run else "removed"
    kept = plural(int(number(answer.get("kept")) or 0), "run")
    parts: list[RenderableType] = [
        table.cell(f"{did} {plural(len(rows), 'run')}, {size(int(total))}; {kept} kept", "bold")
    ]
    if rows:
        named = [[line(row.get("tag") or "?"), line(row.get("id")), size(row.get("bytes"))] for row in rows]
        parts.append(table.table(("TAG", "ID", ">SIZE"), named))
    for each in map(mapping, listed(answer.get("failed"))):
        parts.append(table.cell(line(f"not removed: {each.get('id')}: {each.get('problem')}"), "yellow"))
    return Group(*parts)


def repaired(answer: Mapping[str, Any], *, dry_run: bool) -> RenderableType:
    """What a repair did to each file, or would do, and what it left alone."""
    from rich.console import Group

    runs = [mapping(each) for each in listed(answer.get("repaired"))]
    did = "would repair" if dry_run else "repaired"
    parts: list[RenderableType] = [table.cell(f"{did} {plural(len(runs), 'run')}", "bold")]
    rows = []
    for run in runs:
        for each in map(mapping, listed(run.get("files"))):
            how = f"{each.get('did')}{_from(each)}"
            rows.append([line(run.get("tag") or "?"), line(run.get("id")), line(each.get("name")), line(how),
                         line(each.get("problem"))])  # fmt: skip
    if rows:
        parts.append(table.table(("TAG", "ID", "FILE", "HOW", "PROBLEM"), rows))
        parts.append(
            table.cell("the damaged bytes are kept beside each file, as <name>.damaged-<time>", "dim")
        )
    for each in map(mapping, listed(answer.get("left"))):
        parts.append(table.cell(line(f"left alone: {each.get('id')}: {each.get('why')}"), "yellow"))
    return Group(*parts)


def _from(file: Mapping[str, Any]) -> str:
    """` from events.jsonl; not known any more: peak memory`."""
    source = f" from {file['source']}" if text(file.get("source")) else ""
    unknown = [text(each) for each in listed(file.get("unknown"))]
    return source + (f"; not known any more: {', '.join(unknown)}" if unknown else "")


def summary_parts(summary: Mapping[str, Any]) -> list[RenderableType]:
    """summary.json: headline, lossless, table, notes."""
    parts: list[RenderableType] = []
    if text(summary.get("headline")):
        parts.append(table.cell(line(summary.get("headline")), "bold green"))
    lossless = summary.get("lossless")
    if isinstance(lossless, bool):
        parts.append(
            table.cell(f"lossless: {'yes' if lossless else 'NO'}", "green" if lossless else "bold red")
        )
    made = mapping(summary.get("table"))
    columns = [line(each) for each in listed(made.get("columns"))]
    rows = [[line(each) for each in listed(row)][: len(columns)] for row in listed(made.get("rows"))]
    if columns and rows:
        named = [columns[0], *(f">{each}" for each in columns[1:])]
        parts.append(table.table(named, [row + [""] * (len(columns) - len(row)) for row in rows]))
    notes = [str(note) for note in listed(summary.get("notes"))]
    parts += [table.cell(line(f"note: {note}"), "dim") for note in notes if not note.startswith("lossless:")]
    return parts


def document(history: History) -> dict[str, Any]:
    """Schema dflashctl.runs/1."""
    return {
        "host": history.host,
        "total": history.total,
        "runs": [entry_document(entry) for entry in history.entries],
        "damaged": [{"id": run_id, "problem": problem} for run_id, problem in history.damaged],
    }


def entry_document(entry: Entry) -> dict[str, Any]:
    facts, record, ending = entry.facts, entry.facts.record, entry.facts.ending
    return {
        "id": facts.id,
        "tag": facts.tag or None,
        "state": entry.verdict.state,
        "evidence": list(entry.verdict.evidence),
        "created_at": entry.created_at,
        "created_by": record.get("created_by"),
        "took_s": entry.took_s,
        "exit": ending
        and {
            "cause": ending.cause,
            "code": ending.code,
            "signal": ending.signal,
            "oom": ending.oom,
        },
        "recipe": record.get("recipe"),
        "variant": record.get("variant"),
        "release": record.get("release"),
        "git": record.get("git"),
        "gpus": list(facts.gpu_indices),
        "headline": facts.headline or None,
        "note": entry.note or None,
        "lossless": entry.lossless,
        "best_acceptance_length": number(entry.best_acceptance_length),
        "log": facts.log.path if facts.log else None,
    }


def command_line(record: Mapping[str, Any]) -> str:
    """A run's command as a shell takes it: without its quotes, `sh -c 'sleep 1; exit 3'` reads as two."""
    return shlex.join(str(word) for word in listed(record.get("command")))


def one_document(shown: Shown) -> dict[str, Any]:
    """Schema dflashctl.run/1: the entry, and the files of the run's folder as they are."""
    detail = shown.detail
    files = ("record", "exit", "summary", "root_cause", "environment", "notes", "files", "events", "folder")
    return {"host": shown.host, **entry_document(shown.entry), **{name: detail.get(name) for name in files}}
