"""`dflashctl report`: a run as one document for a colleague."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption, run_argument

app = typer.Typer()

NameArgument = Annotated[str, run_argument("A tag (its newest run), or a run's id or its end.")]


@app.command()
def report(
    name: NameArgument, host: HostOption = None, json: JsonOption = False, verbose: VerboseOption = False
) -> None:
    """Print a run as one Markdown document: what ran, how it ended, figures, notes, checkpoints, recipe.

    Save it with `dflashctl report TAG > TAG.md`; --json has every package, event and file besides.
    """
    from dflashctl.config import load_hosts
    from dflashctl.history.listing import show_run
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.json import emit
    from dflashctl.views.report import document, markdown

    with open_engine(load_hosts().host(host)) as engine:
        shown = show_run(engine, name)
    if json:
        emit("dflashctl.report/1", document(shown))
    else:
        print(markdown(shown), end="")
