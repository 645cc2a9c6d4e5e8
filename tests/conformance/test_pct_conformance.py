"""The conformance table of `pct`, row by row, at both places. `make conformance` prints it."""

from __future__ import annotations

import pytest
from pctkit import lxc, table, userns
from pctkit.place import StandIn, unfit

ROWS = table.load()


def _rows(place: type[StandIn]) -> list[object]:
    """The rows that apply to a place; tests/unit/test_pct_table.py names the others."""
    return [pytest.param(row, id=row.id) for row in ROWS if not unfit(row, place.name, place.has)]


@pytest.mark.lab
@pytest.mark.parametrize("row", _rows(userns.Userns))
def test_over_user_namespaces(userns_place: userns.Userns, row: table.Row) -> None:
    assert userns_place.judge(row) == []


@pytest.mark.bed
@pytest.mark.parametrize("row", _rows(lxc.Lxc))
def test_over_lxc(lxc_place: lxc.Lxc, row: table.Row) -> None:
    assert lxc_place.judge(row) == []
