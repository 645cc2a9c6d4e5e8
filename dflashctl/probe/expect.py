"""What each case is expected to answer on a version of torch: `probes:` of trainer/known_failures.yaml.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from dflashctl.runs import known

Answer = Literal["passes", "fails", "either"]
Basis = Literal["measured", "read"]
ANSWERS = ("passes", "fails", "either")
BASES = ("measured", "read")


@dataclass(frozen=True)
class Expectation:
    """One row; the meaning of each field stands above `probes:` in the table."""

    probe: str
    case: str
    torch: str
    answer: Answer
    basis: Basis
    source: str
    failures: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """`either` stays alone: which failures count is said where one of another kind is met."""
        named = f": {' or '.join(self.failures)}"
        return f"fails{named}" if self.answer == "fails" else self.answer


def parse(text: str, names: Sequence[str]) -> tuple[Expectation, ...]:
    """`names`: of the table's failures. Raises ValueError naming probe and case of a wrong row."""
    rows = []
    for fields in yaml.safe_load(text).get("probes") or ():
        values: dict[str, Any] = {**fields, "failures": tuple(fields.get("failures") or ())}
        row = Expectation(**values)
        where = f"{row.probe} {row.case} {row.torch}"
        try:
            SpecifierSet(row.torch)
        except InvalidSpecifier as error:
            raise ValueError(f"{where}: {error}") from None
        if row.answer not in ANSWERS or row.basis not in BASES or not row.source:
            raise ValueError(f"{where}: answer, basis or source is wrong")
        strange = sorted(set(row.failures) - set(names))
        if strange or bool(row.failures) == (row.answer == "passes"):
            raise ValueError(f"{where}: failures {strange or row.failures} do not fit")
        rows.append(row)
    return tuple(rows)


@cache
def table() -> tuple[Expectation, ...]:
    """The shipped one."""
    return parse(known.text(), list(known.by_name()))


def expected(
    probe: str, case: str, torch: str | None, rows: Sequence[Expectation] | None = None
) -> Expectation | None:
    """The first row for this case and version (`2.11.0+cu130`); None where nothing is known."""
    try:
        version = Version(torch or "")
    except InvalidVersion:
        return None
    for row in table() if rows is None else rows:
        fits = SpecifierSet(row.torch).contains(version.base_version, prereleases=True)
        if (row.probe, row.case) == (probe, case) and fits:
            return row
    return None
