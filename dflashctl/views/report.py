"""A run as one Markdown document, for a colleague who was not there. Everything from the run's files is text:
nothing in it can end a table, a code block or a line."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflashctl.history.listing import Shown
from dflashctl.render.text import block, duration, line, plural, size
from dflashctl.runs.facts import listed, mapping, number, text, whole
from dflashctl.views.history import command_line, one_document

MACHINE = ("python", "driver", "kernel", "cpus")
PACKAGES = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy")
"""Those that decide what a training does; the JSON document has all."""


def document(shown: Shown) -> dict[str, Any]:
    """Schema dflashctl.report/1: as dflashctl.run/1, with the recipe's text and the checkpoints."""
    more = {name: shown.detail.get(name) for name in ("recipe", "checkpoints")}
    return one_document(shown) | {"recipe_text": more["recipe"], "checkpoints": more["checkpoints"]}


def markdown(shown: Shown) -> str:
    """The document; sections of which nothing is known are left out."""
    entry = shown.entry
    facts, verdict = entry.facts, entry.verdict
    parts = [f"# {words(facts.name)}: {verdict.state}", ""]
    parts += [f"- {words(each)}" for each in verdict.evidence if each != facts.headline]  # see Figures
    parts += ["", *pairs(run_rows(shown))]
    for title, body in (
        ("Learnt", note_lines(shown)),
        ("Figures", figure_lines(mapping(shown.detail.get("summary")))),
        ("Why it failed", failure_lines(shown)),
        ("Checkpoints", checkpoint_lines(mapping(shown.detail.get("checkpoints")))),
        ("Environment", environment_lines(mapping(shown.detail.get("environment")))),
        ("Recipe as this run got it", fenced(text(shown.detail.get("recipe")), "yaml")),
    ):
        if body:
            parts += ["", f"## {title}", "", *body]
    return "\n".join(parts) + "\n"


def run_rows(shown: Shown) -> list[tuple[str, str]]:
    """What ran, where, when, by whom, with which code."""
    entry, record = shown.entry, mapping(shown.detail.get("record"))
    facts, files = entry.facts, shown.detail.get("files")
    variant = f", variant {record['variant']}" if record.get("variant") else ""
    git = mapping(record.get("git"))
    commit = (
        f"git {git['commit']}" + (", with changes" if git.get("dirty") else "") if git.get("commit") else ""
    )
    gpus = [f"{gpu.get('index')} ({gpu.get('uuid')})" for gpu in map(mapping, listed(record.get("gpus")))]
    ending = facts.ending
    memory = size(ending.peak_rss_bytes) if ending and ending.peak_rss_bytes else ""
    return [
        ("run", f"{facts.id} on {shown.host}"),
        ("recipe", f"{record.get('recipe')}{variant}" if record.get("recipe") else ""),
        ("release", text(record.get("release"))),
        ("commit", commit),
        ("files", plural(len(files), "file") + " (runs show --code)" if isinstance(files, Mapping) else ""),
        ("launched", f"{moment(entry.created_at)} by {record.get('created_by') or 'somebody'}"),
        ("why", text(record.get("reason"))),
        ("took", "" if entry.took_s is None else duration(entry.took_s)),
        ("main memory", f"at most {memory}" if memory else ""),
        ("GPUs", ", ".join(gpus)),
        ("command", command_line(record)),
        ("log", facts.log.path if facts.log else ""),
        ("folder", text(shown.detail.get("folder"))),
    ]


def note_lines(shown: Shown) -> list[str]:
    notes = map(mapping, listed(shown.detail.get("notes")))
    return [
        f"- {words(each.get('text'))} ({words(each.get('by'))}, {moment(number(each.get('at')))})"
        for each in notes
    ]


def figure_lines(summary: Mapping[str, Any]) -> list[str]:
    """summary.json: headline, losslessness, the table of acceptance lengths, notes."""
    lines = [f"**{words(summary['headline'])}**", ""] if text(summary.get("headline")) else []
    if isinstance(summary.get("lossless"), bool):
        lines += [f"Lossless: {'yes' if summary['lossless'] else 'NO'}.", ""]
    made = mapping(summary.get("table"))
    columns, rows = listed(made.get("columns")), [listed(row) for row in listed(made.get("rows"))]
    if columns and rows:
        lines += [*grid(columns, rows), ""]
    lines += [f"- {words(each)}" for each in listed(summary.get("notes"))]
    return lines[:-1] if lines and not lines[-1] else lines


def failure_lines(shown: Shown) -> list[str]:
    """The program's own word and what is known of it."""
    facts = shown.entry.facts
    lines = [f"- {words(facts.root_cause)}"] if facts.root_cause else []
    for cause in facts.root_cause_known:
        lines += [
            f"- known as {words(cause.name)}: {words(cause.meaning)}",
            *(f"  - {words(do)}" for do in cause.do),
        ]
    traceback = text(mapping(shown.detail.get("root_cause")).get("traceback"))
    return lines + (["", *fenced(traceback)] if traceback.strip() else [])


def checkpoint_lines(found: Mapping[str, Any]) -> list[str]:
    best = text(found.get("best"))
    lines = []
    for each in map(mapping, listed(found.get("folders"))):
        mark = " (best by real decoding)" if best and each.get("name") == best else ""
        lines.append(f"- {words(each.get('name'))}, {size(whole(each.get('bytes')))}{mark}")
    return lines


def environment_lines(environment: Mapping[str, Any]) -> list[str]:
    packages = mapping(environment.get("packages"))
    rows = [(name, str(environment[name])) for name in MACHINE if environment.get(name) is not None]
    return pairs(rows + [(name, text(packages.get(name))) for name in PACKAGES]) if environment else []


# --- Markdown ---------------------------------------------------------------------------------------------


def words(value: object) -> str:
    """One line of plain text: what Markdown would obey is escaped, control characters are shown."""
    # An underscore within a word is one to Markdown too: paths stay readable.
    return re.sub(r"([\\`*\[\]<>|#]|(?<!\w)_|_(?!\w))", r"\\\1", line(value))


def pairs(rows: Iterable[tuple[str, str]]) -> list[str]:
    return grid(("", ""), [row for row in rows if row[1]])


def grid(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    wide = len(columns)
    filled = [[*row, *[""] * wide][:wide] for row in rows]
    made = [" | ".join(map(words, row)) for row in ([*columns], *filled)]
    return [f"| {made[0]} |", "|" + "---|" * wide, *(f"| {each} |" for each in made[1:])]


def fenced(content: str, language: str = "") -> list[str]:
    """A code block that no run of backticks within it can end."""
    if not content.strip():
        return []
    longest = max((len(found) for found in re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence + language, *block(content.rstrip("\n")).split("\n"), fence]


def moment(at: float | None) -> str:
    """In UTC: the reader may be elsewhere."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
