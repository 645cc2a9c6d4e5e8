"""`dflashctl logs`: show a run's log, follow it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption

app = typer.Typer()
SCHEMA = "dflashctl.logs/1"

TagArgument = Annotated[
    str | None, typer.Argument(help="A run's tag; without it the only live run, else the newest.")
]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")]
LinesOption = Annotated[int, typer.Option("--lines", "-n", help="The last N lines; 0: all.", min=0)]


@app.command()
def logs(
    tag: TagArgument = None,
    host: HostOption = None,
    follow: FollowOption = False,
    lines: LinesOption = 100,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show the end of a run's log, or follow it through lost connections until the run ends.

    Control characters are shown as escapes; a progress bar is shown as its last state.
    """
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError
    from dflashctl.render.json import emit
    from dflashctl.render.logview import View
    from dflashctl.runs.logs import Source, read

    if json and follow:
        raise UsageError("--json prints one document, --follow never ends", next="leave one of them out")
    target = load_hosts().host(host)
    view = View(sys.stdout, sys.stderr, collect=json)
    run: dict[str, Any] = {}
    with view:
        read(target, Source(run.update, view.data, view.notice), tag=tag, lines=lines, follow=follow)
    if json:
        emit(
            SCHEMA,
            {
                "host": target.name,
                **{key: run.get(key) for key in ("id", "tag", "path")},
                "lines": view.lines,
            },
        )
