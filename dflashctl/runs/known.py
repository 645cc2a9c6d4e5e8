"""The table of known failures (trainer/known_failures.yaml): read here, matched by the agent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml


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

    def finds(self, line: str) -> bool:
        """The rule that the agent applies, for one line."""
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
    return parse(resources.files("trainer").joinpath("known_failures.yaml").read_text(encoding="utf-8"))


@cache
def by_name() -> dict[str, KnownFailure]:
    return {row.name: row for row in table()}


def patterns() -> list[dict[str, str]]:
    """What travels in a request: the agent has no YAML and no table."""
    return [{"name": row.name, "pattern": row.pattern, "unless": row.unless} for row in table()]
