"""How looks at torch are shown, and their JSON documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflashctl.inspect.compare import MISSING, Row
from dflashctl.inspect.facts import Facts, Option, Readable, TorchConfig

VALUE_WIDTH = 60


def text(value: object) -> str:
    """A value as a person writes it in Python, in one line of bounded length."""
    shown = repr(value)
    return shown if len(shown) <= VALUE_WIDTH else shown[: VALUE_WIDTH - 1] + "…"


OPTION_COLUMNS = ("OPTION", "VALUE", "DEFAULT", "FROM", "VARIABLE")


def option_rows(options: Sequence[Option], config: TorchConfig) -> list[tuple[str, ...]]:
    given = config.values
    return [
        (
            each.full_name,
            text(each.value),
            "" if each.value == each.default else text(each.default),
            each.came_from(given),
            " ".join(each.variables),
        )
        for each in options
    ]


def mode_table(modes: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[tuple[str, ...]]]:
    """(columns, rows): options down, modes across; a mode that leaves an option alone shows nothing there."""
    options = sorted({name for chosen in modes.values() for name in chosen})
    rows = [
        (name, *(text(chosen[name]) if name in chosen else "" for chosen in modes.values()))
        for name in options
    ]
    return ["OPTION", *modes], rows


VARIABLE_COLUMNS = ("VARIABLE", "SET TO", "SETS", "READ IN")


def variable_rows(readable: Mapping[str, Readable], given: Mapping[str, str]) -> list[tuple[str, ...]]:
    return [
        (name, given.get(name, ""), " ".join(each.options), " ".join(each.files))
        for name, each in readable.items()
    ]


def mistake_words(config: TorchConfig) -> list[str]:
    """A warning for each variable that is set and that nothing reads."""
    found = []
    for variable, near, meant in config.mistaken():
        words = f"{variable.name}={variable.value} is set, but nothing in torch {config.torch} reads it"
        if meant:
            words += f"; {' and '.join(meant)} can only be set by the program"
        if near:
            words += f"; the nearest that are read: {', '.join(near)}"
        found.append(words)
    return found


def machine_rows(facts: Facts) -> list[tuple[str, object]]:
    return [(name, _flat(value)) for name, value in facts.machine.items()]


def _flat(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else value


def difference_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [(row.section, row.name, _side(row.a), _side(row.b)) for row in rows]


def _side(value: object) -> str:
    return value[:VALUE_WIDTH] if isinstance(value, str) else text(value)


def document(facts: Facts, options: Sequence[Option]) -> dict[str, Any]:
    """Schema dflashctl.inspect/1 for one subject."""
    body: dict[str, Any] = {
        "subject": facts.subject,
        "machine": dict(facts.machine),
        "packages": dict(facts.packages),
        "notes": list(facts.notes),
    }
    config = facts.config
    if config is not None:
        given = config.values
        body["torch"] = config.torch
        body["options"] = [
            {
                "module": each.module,
                "name": each.name,
                "value": each.value,
                "default": each.default,
                "origin": each.origin,
                "from": each.came_from(given),
                "variables": list(each.variables),
            }
            for each in options
        ]
        body["modes"] = config.modes
        body["variables"] = {
            name: {"options": list(each.options), "files": list(each.files)}
            for name, each in config.readable.items()
        }
        body["set"] = [{"name": each.name, "value": each.value, "known": each.known} for each in config.given]
        body["mistaken"] = [
            {"name": each.name, "nearest": list(near), "options": list(meant)}
            for each, near, meant in config.mistaken()
        ]
        body["problems"] = list(config.problems)
    return body


def difference_document(a: str, b: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Schema dflashctl.inspect/1 for two subjects; a side without the thing lacks its key."""
    listed = []
    for row in rows:
        entry: dict[str, Any] = {"section": row.section, "name": row.name, "same": row.same}
        for side, value in (("a", row.a), ("b", row.b)):
            if value is not MISSING:
                entry[side] = value
        listed.append(entry)
    return json.loads(json.dumps({"a": a, "b": b, "rows": listed}))
