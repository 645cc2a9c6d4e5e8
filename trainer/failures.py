"""The table of known failures (known_failures.yaml) and its one reader: for the trainer that dies of one, for
`dflashctl` and for its probe. It needs yaml and nothing else: no torch, no dflashctl.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

TABLE = Path(__file__).with_name("known_failures.yaml")
LINE_CHARS = 4000
LINES = 5000
"""So much of a text is looked at: an error's message may hold a whole file."""


@dataclass(frozen=True)
class KnownFailure:
    """One row; the meaning of each field stands at the head of the table."""

    name: str
    pattern: str
    severity: Literal["fatal", "warning"]
    meaning: str
    torch: str
    do: tuple[str, ...]
    example: str
    unless: str = ""
    also: tuple[str, ...] = ()
    see: tuple[str, ...] = ()
    policies: tuple[dict[str, Any], ...] = ()

    def finds(self, line: str) -> bool:
        """The rule for one line; dflashctl's agent applies the same to whole logs."""
        return bool(re.search(self.pattern, line)) and not (self.unless and re.search(self.unless, line))


def parse(text: str) -> tuple[KnownFailure, ...]:
    """Raises ValueError with the row's name for anything that would fail later inside a container."""
    document = yaml.safe_load(text)
    if not isinstance(document, dict) or document.get("version") != 1:
        raise ValueError("the table of known failures has another version than 1")
    rows = tuple(_row(each) for each in document["failures"])
    names = [row.name for row in rows]
    if len(set(names)) != len(names):
        raise ValueError("two rows of the table of known failures have one name")
    return rows


def _row(fields: dict[str, Any]) -> KnownFailure:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    row = KnownFailure(**values)
    if row.severity not in ("fatal", "warning"):
        raise ValueError(f"{row.name}: no such severity: {row.severity}")
    try:
        re.compile(row.pattern.encode("ascii"))
        re.compile(row.unless.encode("ascii"))
    except (re.error, UnicodeEncodeError) as error:
        raise ValueError(f"{row.name}: pattern: {error}") from None
    return row


@cache
def table() -> tuple[KnownFailure, ...]:
    """The shipped table, in its order: the earlier row names a line that several match."""
    return parse(TABLE.read_text(encoding="utf-8"))


@cache
def by_name() -> dict[str, KnownFailure]:
    return {row.name: row for row in table()}


def find(text: str) -> tuple[KnownFailure, ...]:
    """The rows that a text (a log, a traceback) shows: fatal ones first, else in the order of their lines."""
    found: dict[str, KnownFailure] = {}
    for line in text.splitlines()[:LINES]:
        found.update(
            (row.name, row) for row in table() if row.name not in found and row.finds(line[:LINE_CHARS])
        )
    return tuple(sorted(found.values(), key=lambda row: row.severity != "fatal"))


def of_error(error: BaseException) -> tuple[KnownFailure, ...]:
    """The rows that an exception's traceback shows, its causes included.

    Never raises: a table that cannot be read (a damaged or half-deployed release) must not hide the failure
    that it is asked about; then no row is known.
    """
    try:
        return find("".join(traceback.format_exception(error)))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return ()


def words(rows: tuple[KnownFailure, ...]) -> str:
    """What a log says of them, a block a row; "" for none."""
    blocks = []
    for row in rows:
        of = "" if row.torch == "any" else f" (torch: {row.torch})"
        blocks.append(
            "\n".join([f"known failure {row.name}{of}: {row.meaning}", *(f"  do: {each}" for each in row.do)])
        )
    return "\n".join(blocks)


def as_json(rows: tuple[KnownFailure, ...]) -> list[dict[str, Any]]:
    """For root_cause.json: [{name, meaning, torch, do}]."""
    return [
        {"name": row.name, "meaning": row.meaning, "torch": row.torch, "do": list(row.do)} for row in rows
    ]
