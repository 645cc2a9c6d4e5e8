"""`dflashctl explain`: known failures in a run's log, what they mean, what helps."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption, run_argument

app = typer.Typer()
SCAN_S = 30.0
"""A log of several gigabytes is searched whole."""

TagArgument = Annotated[str, run_argument("A run's tag or id.")]


@app.command()
def explain(
    tag: TagArgument, host: HostOption = None, json: JsonOption = False, verbose: VerboseOption = False
) -> None:
    """Look for known failures in a run's log: what each means, and what helps."""
    from dflashctl.cli.onehost import one_host
    from dflashctl.runs.status import look
    from dflashctl.views import explain as view

    one_host(
        host,
        lambda engine: look(engine, tag=tag, sample_s=0.0, scan_s=SCAN_S),
        json=json,
        schema="dflashctl.explain/1",
        document=lambda seen: {"host": seen.host, **view.document(seen.rows[0])},
        shown=lambda seen: view.explanation(seen.rows[0]),
    )
