"""`dflashctl runs`: past and present runs, and what was learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.config.hosts import Host

app = typer.Typer(help="List past and present runs and what was learnt.", invoke_without_command=True)

LimitOption = Annotated[int, typer.Option("--limit", "-n", help="The newest N runs.", min=1)]
TagOption = Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.")]
NameArgument = Annotated[str | None, typer.Argument(help="A tag (its newest run), or a run's id or its end.")]


@app.callback()
def default(
    context: typer.Context,
    host: HostOption = None,
    limit: LimitOption = 20,
    tag: TagOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """List past and present runs, the newest first. `runs show NAME` tells everything about one."""
    if context.invoked_subcommand is None:
        _list(host, limit, tag, json)


@app.command("list")
def list_(
    host: HostOption = None,
    limit: LimitOption = 20,
    tag: TagOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """List past and present runs, the newest first."""
    _list(host, limit, tag, json)


@app.command()
def show(
    name: NameArgument = None,
    host: HostOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show one run: what was launched, how it ended, what was learnt."""
    from dflashctl.config import load_hosts
    from dflashctl.remote.factory import open_engine
    from dflashctl.render import history as render
    from dflashctl.render.json import emit
    from dflashctl.render.table import show as print_
    from dflashctl.runs.history import show_run

    with open_engine(load_hosts().host(host)) as engine:
        shown = show_run(engine, name)
    if json:
        emit("dflashctl.run/1", render.one_document(shown))
    else:
        print_(render.one(shown))


def _list(host: str | None, limit: int, tag: str | None, json: bool) -> None:
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts
    from dflashctl.remote.factory import open_engine
    from dflashctl.render import history as render
    from dflashctl.render.table import show as print_
    from dflashctl.runs.history import list_runs

    def act(target: Host) -> Outcome:
        with open_engine(target) as engine:
            history = list_runs(engine, limit=limit, tag=tag)
        if not json:
            print_(render.overview(history))
        return Outcome(render.document(history))

    each_host(load_hosts().hosts(host), act, json=json, schema="dflashctl.runs/1")
