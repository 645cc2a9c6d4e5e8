"""`dflashctl stacks`: where every process of a run stands in its code."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption, run_argument

app = typer.Typer()
TagArgument = Annotated[str | None, run_argument("A run's tag or id; without it the only live run.")]
AgainOption = Annotated[float, typer.Option("--again", help="Seconds between the looks.", min=0.1, max=60)]


@app.command()
def stacks(
    tag: TagArgument = None,
    host: HostOption = None,
    again: AgainOption = 3.0,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show the Python stacks of every process of a run, looked at twice; what did not move is marked.

    By py-spy inside, else py-spy on the host, else the program's own faulthandler. Nothing is ended by this.
    """
    from dflashctl.cli.onehost import one_host
    from dflashctl.errors import UsageError
    from dflashctl.runs.stacks import read_stacks
    from dflashctl.views import stacks as view

    found = one_host(
        host,
        lambda engine: read_stacks(engine, tag, again_s=again),
        json=json,
        schema="dflashctl.stacks/1",
        document=view.document,
        shown=view.shown,
    )
    if not any(each.how for each in found.processes):
        reasons = dict.fromkeys(reason for each in found.processes for reason in each.problems)
        raise UsageError(
            "no stack of any process could be read",
            where=found.host,
            next="; ".join(reasons) + ". Install py-spy beside the run's Python, or on the host",
        )
