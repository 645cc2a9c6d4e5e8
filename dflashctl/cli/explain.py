"""`dflashctl explain`: known failures in a run's log, what they mean, what helps."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption

app = typer.Typer()
SCAN_S = 30.0
"""A log of several gigabytes is searched whole."""

TagArgument = Annotated[str, typer.Argument(help="A run's tag.")]


@app.command()
def explain(
    tag: TagArgument, host: HostOption = None, json: JsonOption = False, verbose: VerboseOption = False
) -> None:
    """Look for known failures in a run's log: what each means, and what helps."""
    from dflashctl.config import load_hosts
    from dflashctl.remote.factory import open_engine
    from dflashctl.render import explain as render
    from dflashctl.render.json import emit
    from dflashctl.render.table import show
    from dflashctl.runs.status import look

    with open_engine(load_hosts().host(host)) as engine:
        row = look(engine, tag=tag, sample_s=0.0, scan_s=SCAN_S).rows[0]
    if json:
        emit("dflashctl.explain/1", {"host": engine.host.name, **render.document(row)})
    else:
        show(render.explanation(row))
