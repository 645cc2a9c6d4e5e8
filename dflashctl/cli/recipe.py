"""`dflashctl recipe`: which recipes there are, and what one becomes for a tag."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.common import JsonOption

app = typer.Typer(help="The recipes: list, show.", no_args_is_help=True)


@app.command(name="list")
def list_(json: JsonOption = False) -> None:
    """List the recipes that can be named here."""
    from dflashctl.config import load_hosts
    from dflashctl.render.json import emit
    from dflashctl.render.table import print_table, warn
    from dflashctl.runs.recipes import overview

    hosts = load_hosts()
    rows = overview(hosts)
    if json:
        emit(
            "dflashctl.recipes/1",
            {"default": hosts.defaults.recipe, "recipes": [row.payload() for row in rows]},
        )
        return
    if not rows:
        warn("no recipes here or above: write recipes/NAME.yaml, in the folder of hosts.yaml or in this one")
        return
    print_table(["RECIPE", "VARIANTS", "FILE"], [row.cells() for row in rows])


@app.command()
def show(
    recipe: Annotated[str | None, typer.Argument(help="Name or file; the default one without.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Show it as a run with this tag gets it.")] = None,
    json: JsonOption = False,
) -> None:
    """Print a checked recipe, with the variant of a tag laid over it."""
    from dflashctl.config import load_hosts, load_recipe
    from dflashctl.render.json import emit
    from dflashctl.render.table import say, warn
    from dflashctl.runs.recipes import shown

    found = load_recipe(recipe, load_hosts())
    view = shown(found, tag)
    if json:
        emit("dflashctl.recipe/1", view.payload())
        return
    if tag is not None:
        warn(view.variant_words)
    for warning in view.warnings:
        warn(f"warning: {warning}")
    say(view.text.rstrip("\n"))
