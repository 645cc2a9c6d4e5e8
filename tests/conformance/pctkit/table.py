"""Rows of the table: read, checked, filled in for a place, and compared with what happened there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "pct"
PLACES = ("lxc", "userns", "real")


@dataclass(frozen=True)
class Expected:
    """What a command must print and return. `*_match` is a regular expression over the whole text, for what
    differs from call to call; `stderr_lines` compares only that many first lines (all that was recorded)."""

    exit: int = 0
    stdout: str = ""
    stderr: str = ""
    stdout_match: str | None = None
    stderr_match: str | None = None
    stderr_lines: int | None = None


@dataclass(frozen=True)
class Check:
    """State afterwards: a command on the host, and exactly what it prints."""

    run: str
    stdout: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `command` and the other scripts are run by bash on the host; {ct}, {host} and the like stand for what the
    place has (Place.names). `seen` tells where the real program gave this answer ("" = never). `needs` names
    what a place must have. `exceptions` maps a place to its reason and what is different there (or `skip:
    true`).
    """

    id: str
    cites: str
    command: str
    expected: Expected
    seen: str = ""
    observed: int | None = None  # number in observed.txt
    before: tuple[str, ...] = ()
    after: tuple[Check, ...] = ()
    cleanup: tuple[str, ...] = ()
    stdin: str = ""
    destructive: bool = False
    needs: tuple[str, ...] = ()
    pve: int = 9
    containers: tuple[int, ...] = (200, 201)
    config: dict[int, str] = field(default_factory=dict)
    seconds: float = 60.0
    exceptions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def at(self, place: str) -> Row:
        """The row as it has to be at that place."""
        changes = {k: v for k, v in self.exceptions.get(place, {}).items() if k not in ("why", "skip")}
        if not changes:
            return self
        row = replace(self, expected=replace(self.expected, **_only(changes, Expected)))
        return replace(row, **_parsed({k: v for k, v in changes.items() if k in _ROW_FIELDS}))

    def skipped_at(self, place: str) -> str:
        """Why the row does not apply at that place; "" when it does."""
        exception = self.exceptions.get(place, {})
        return str(exception["why"]) if exception.get("skip") else ""


_EXPECTED_FIELDS = {f.name for f in fields(Expected)}
_ROW_FIELDS = {f.name for f in fields(Row)} - {"expected"}


def load(folder: Path = FOLDER) -> list[Row]:
    """All rows, in the order of files and lines. ValueError names the file and the row that is wrong."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text()):
            try:
                rows.append(_row(entry))
            except (TypeError, ValueError, KeyError) as error:
                raise ValueError(f"{path.name}: row {entry.get('id', '?')}: {error}") from None
    ids = [row.id for row in rows]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise ValueError(f"ids used twice: {sorted(twice)}")
    return rows


def _row(entry: dict[str, Any]) -> Row:
    if unknown := set(entry) - _EXPECTED_FIELDS - _ROW_FIELDS:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    for place, exception in entry.get("exceptions", {}).items():
        if place not in PLACES or "why" not in exception:
            raise ValueError(f"exception {place}: not a place, or without its reason (why)")
    expected = Expected(**_only(entry, Expected))
    return Row(expected=expected, **_parsed({k: v for k, v in entry.items() if k in _ROW_FIELDS}))


def _only(entry: dict[str, Any], kind: type) -> dict[str, Any]:
    return {k: v for k, v in entry.items() if k in {f.name for f in fields(kind)}}


def _parsed(values: dict[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for name in ("before", "cleanup", "needs", "containers"):
        if name in result:
            result[name] = tuple(result[name])
    if "after" in result:
        result["after"] = tuple(Check(**check) for check in result["after"])
    return result


def fill(text: str, names: dict[str, str]) -> str:
    """Put a place's names in: `{ct}` and so on. Other braces stay."""
    return re.sub(r"\{([a-z_]+)\}", lambda match: names.get(match[1], match[0]), text)


@dataclass(frozen=True)
class Done:
    """What came of a script. `exit` 124 with `timed_out`: it was killed at its deadline."""

    stdout: str
    stderr: str
    exit: int
    timed_out: bool = False


def differences(expected: Expected, done: Done, names: dict[str, str]) -> list[str]:
    """How an answer differs from what is expected; empty when it does not."""
    found = []
    if done.timed_out:
        found.append("it did not end in time")
    if done.exit != expected.exit:
        found.append(f"exit: expected {expected.exit}, got {done.exit}")
    found += _text("stdout", expected.stdout, expected.stdout_match, done.stdout, names)
    got = done.stderr
    if expected.stderr_lines is not None:
        got = "".join(got.splitlines(keepends=True)[: expected.stderr_lines])
    found += _text("stderr", expected.stderr, expected.stderr_match, got, names)
    return found


def _text(kind: str, exact: str, pattern: str | None, got: str, names: dict[str, str]) -> list[str]:
    if pattern is not None:
        escaped = {name: re.escape(value) for name, value in names.items()}
        if re.fullmatch(fill(pattern, escaped), got, re.DOTALL):
            return []
        return [f"{kind}: expected to match {pattern!r}, got {got!r}"]
    wanted = fill(exact, names)
    return [] if got == wanted else [f"{kind}: expected {wanted!r}, got {got!r}"]
