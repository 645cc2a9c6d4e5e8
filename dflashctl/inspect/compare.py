"""Two looks beside each other. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflashctl.inspect.facts import Facts, TorchConfig


class Missing:
    """It is not there at all, which is something else than None."""

    def __repr__(self) -> str:
        return "(not there)"


MISSING = Missing()


@dataclass(frozen=True)
class Row:
    """One thing on both sides."""

    section: str
    name: str
    a: Any
    b: Any

    @property
    def same(self) -> bool:
        return bool(self.a == self.b)


def compare(a: Facts, b: Facts) -> tuple[Row, ...]:
    """Everything that either has, section by section, sorted by name within each."""
    rows = [*_rows("machine", a.machine, b.machine), *_rows("package", a.packages, b.packages)]
    if a.config is not None and b.config is not None:
        rows += _rows("variable", a.config.values, b.config.values)
        rows += _rows("option", _options(a.config), _options(b.config))
        rows += _rows("mode", _modes(a.config), _modes(b.config))
    return tuple(rows)


def _rows(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Row]:
    for name in sorted(set(a) | set(b)):
        yield Row(section, name, a.get(name, MISSING), b.get(name, MISSING))


def _options(config: TorchConfig) -> dict[str, Any]:
    return {each.full_name: each.value for each in config.options}


def _modes(config: TorchConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode, options in config.modes.items():
        found[mode] = "listed"
        found |= {f"{mode}: {name}": value for name, value in options.items()}
    return found
