"""`dflashctl schema`: JSON schemas of the files that people write, for their editors."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer()


class Kind(StrEnum):
    """The files that have a schema."""

    hosts = "hosts"
    recipe = "recipe"


@app.command()
def schema(
    kind: Annotated[Kind, typer.Argument(help="hosts (hosts.yaml) or recipe (recipes/NAME.yaml).")],
) -> None:
    """Print the JSON schema of hosts.yaml or of a recipe."""
    from dflashctl.config.schema import schema_text

    print(schema_text(kind.value), end="")
