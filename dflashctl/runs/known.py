"""The table of known failures for all of dflashctl, and as the agent is asked for it. Its one reader is
trainer/failures.py."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from trainer.failures import KnownFailure

READER = Path(__file__).parents[2] / "trainer" / "failures.py"


@cache
def _reader() -> ModuleType:
    """By its file: that of the trainer which came with this dflashctl. A project may have another program of
    the name `trainer`, and Python would find that one first."""
    name = "dflashctl.runs._known_failures"
    spec = spec_from_file_location(name, READER)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table() -> tuple[KnownFailure, ...]:
    """All rows, in their order."""
    rows: tuple[KnownFailure, ...] = _reader().table()
    return rows


def by_name() -> dict[str, KnownFailure]:
    rows: dict[str, KnownFailure] = _reader().by_name()
    return rows


def find(text: str) -> tuple[KnownFailure, ...]:
    """The rows that a text shows, fatal ones first."""
    rows: tuple[KnownFailure, ...] = _reader().find(text)
    return rows


def text() -> str:
    """The table's own text: `probes:` in it is read by probe/expect.py alone."""
    shipped: Path = _reader().TABLE
    return shipped.read_text(encoding="utf-8")


def patterns() -> list[dict[str, str]]:
    """What travels in a request: the agent has no YAML and no table."""
    return [{"name": row.name, "pattern": row.pattern, "unless": row.unless} for row in table()]
