"""What `dflashctl probe --json` prints, one for a host. docs/schema/probe.json is made from this."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, RootModel

from dflashctl.render.part import Part

SCHEMA = "dflashctl.probe/1"


class GpuPart(Part):
    index: int
    uuid: str


class ExpectedPart(Part):
    """The row of the table that fits this torch."""

    answer: Literal["passes", "fails", "either"]
    failures: list[str] = Field(description="Known failures of which a failing case must show one.")
    torch: str
    basis: Literal["measured", "read"]
    source: str


class CasePart(Part):
    """One program's answer."""

    name: str
    question: str
    answer: Literal["passes", "fails", "hangs", "crashes", "needs", "not run"]
    failure: str | None = Field(description="Its row in the table of known failures.")
    said: str = Field(description="The error, or what is needed.")
    seconds: float | None
    figures: dict[str, Any]
    expected: ExpectedPart | None
    agrees: bool | None


class ProbeDocument(Part):
    """A probe that was run. A file of one's own has no `torch` and `cases`, but `log_tail`."""

    schema_: Literal["dflashctl.probe/1"] = Field(alias="schema")
    host: str
    run: str
    tag: str
    probe: Literal["threads", "step", "p2p", "ipc", "nccl"] | None
    gpus: list[GpuPart]
    log: str
    note: str = Field(description="Why it had no GPU; mostly empty.")
    exit: dict[str, Any] | None = Field(description="exit.json of the run.")
    torch: str | None = None
    cases: list[CasePart] | None = None
    log_tail: str | None = None


class ProbePlan(Part):
    """With --dry-run: what launch --dry-run prints, and the programs."""

    model_config = ConfigDict(extra="allow", frozen=True)
    schema_: Literal["dflashctl.probe/1"] = Field(alias="schema")
    host: str
    dry_run: Literal[True]
    command: list[str]
    env: dict[str, str]
    cases: list[str]
    deadline_s: float


class AnyProbeDocument(RootModel[ProbeDocument | ProbePlan]):
    """Whatever `probe --json` prints."""
