"""`dflashctl schema`: JSON schemas of the files that people write, for their editors; and of documents."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer()


class Kind(StrEnum):
    """What has a schema."""

    hosts = "hosts"
    recipe = "recipe"
    doctor = "doctor"
    inspect = "inspect"
    probe = "probe"


@app.command()
def schema(
    kind: Annotated[
        Kind,
        typer.Argument(
            help="hosts (hosts.yaml), recipe (recipes/NAME.yaml); doctor, inspect, probe: their --json."
        ),
    ],
) -> None:
    """Print the JSON schema of hosts.yaml, of a recipe, or of what a command prints with --json."""
    from dflashctl.schemas import schema_text

    print(schema_text(kind.value), end="")
