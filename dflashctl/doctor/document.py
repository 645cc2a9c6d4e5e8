"""What `dflashctl doctor --json` prints, one for a host. docs/schema/doctor.json is made from this."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dflashctl.render.hints import complete
from dflashctl.render.part import Part

if TYPE_CHECKING:
    from dflashctl.config.hosts import Host
    from dflashctl.doctor.checks import Report

SCHEMA = "dflashctl.doctor/1"


class LinePart(Part):
    """One check."""

    name: str
    group: Literal["connection", "container", "devices", "GPUs", "room", "software"]
    status: Literal["ok", "warning", "failure", "not known"]
    found: str = Field(description="What was seen, or why it is not known.")
    means: str = Field(description="What that means for a run; empty where all is well.")
    mend: str = Field(description="How to mend it; empty where there is nothing to mend.")


class LeftOut(Part):
    """A check that makes no sense for this host."""

    name: str
    why: str


class Counts(Part):
    """How many lines of each status there are."""

    ok: int
    warning: int
    failure: int
    not_known: int


class DoctorDocument(Part):
    """The whole document."""

    schema_: Literal["dflashctl.doctor/1"] = Field(alias="schema")
    host: str
    engine: Literal["pct", "ssh", "lab", "local"]
    took_s: float
    lines: list[LinePart]
    left_out: list[LeftOut]
    counts: Counts


def payload(host: Host, report: Report, took_s: float) -> dict[str, object]:
    """The document without its schema's name."""
    return {
        "host": host.name,
        "engine": host.engine,
        "took_s": took_s,
        "lines": [{key: complete(value) for key, value in asdict(line).items()} for line in report.lines],
        "left_out": [{"name": name, "why": why} for name, why in report.left_out],
        "counts": {
            "ok": len(report.of("ok")),
            "warning": len(report.of("warning")),
            "failure": len(report.of("failure")),
            "not_known": len(report.of("not known")),
        },
    }
