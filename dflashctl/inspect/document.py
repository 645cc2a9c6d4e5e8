"""What `dflashctl inspect --json` prints. docs/schema/inspect.json is made from this."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from dflashctl.render.part import Part

SCHEMA = "dflashctl.inspect/1"


class OptionPart(Part):
    """An option of one of torch's configuration modules."""

    module: str
    name: str = Field(description="Within the module; of a class in it: class.option.")
    value: Any = Field(description="What JSON has no type for is text.")
    default: Any = Field(description="What the module gives with none of the variables set.")
    origin: Literal["default", "environment", "set", "alias"]
    from_: str = Field(alias="from", description="In words; of an environment variable its name.")
    variables: list[str] = Field(description="What can set it from outside.")


class VariablePart(Part):
    """An environment variable that torch or triton reads."""

    options: list[str]
    files: list[str] = Field(description="Files that read it; not all.")


class SetPart(Part):
    """A variable that is set."""

    name: str
    value: str
    known: Literal["read", "named", "unread"] = Field(
        description="named: no read was found, but the name stands in a source or library."
    )


class MistakePart(Part):
    """A variable that is set and that nothing reads."""

    name: str
    nearest: list[str] = Field(description="The most similar ones that are read.")
    options: list[str] = Field(description="What it seems to mean; only the program can set these.")


class InspectDocument(Part):
    """Of one host or run. The keys from `torch` on are there when the configuration was asked for."""

    schema_: Literal["dflashctl.inspect/1"] = Field(alias="schema")
    subject: str
    machine: dict[str, Any]
    packages: dict[str, str]
    notes: list[str]
    torch: str | None = None
    options: list[OptionPart] | None = None
    modes: dict[str, dict[str, Any]] | None = None
    variables: dict[str, VariablePart] | None = None
    set: list[SetPart] | None = None
    mistaken: list[MistakePart] | None = None
    problems: list[str] | None = None


class RowPart(Part):
    """One thing on both sides; a side that has no such thing lacks its key."""

    section: Literal["machine", "package", "variable", "option", "mode"]
    name: str
    same: bool
    a: Any = None
    b: Any = None


class DifferenceDocument(Part):
    """Of two hosts or runs."""

    schema_: Literal["dflashctl.inspect/1"] = Field(alias="schema")
    a: str
    b: str
    rows: list[RowPart]


class AnyInspectDocument(RootModel[InspectDocument | DifferenceDocument]):
    """Whatever `inspect --json` prints: the second kind with --against."""
