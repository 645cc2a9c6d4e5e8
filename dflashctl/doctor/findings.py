"""What a rule finds: ok, warning, failure, or not known and why; what it means, and how to mend it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dflashctl.doctor.facts import Facts

Status = Literal["ok", "warning", "failure", "not known"]


@dataclass(frozen=True)
class Finding:
    """`found` is what was seen (or why nothing was); `means` and `mend` are empty where all is well."""

    status: Status
    found: str
    means: str = ""
    mend: str = ""


@dataclass(frozen=True)
class Line:
    """A check and its finding, as shown."""

    name: str
    group: str
    status: Status
    found: str
    means: str
    mend: str


Rule = Callable[["Facts"], Finding]


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warning(found: str, means: str, mend: str) -> Finding:
    return Finding("warning", found, means, mend)


def failure(found: str, means: str, mend: str) -> Finding:
    return Finding("failure", found, means, mend)


def not_known(reason: str, mend: str = "") -> Finding:
    return Finding("not known", reason, mend=mend)
