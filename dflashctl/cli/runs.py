"""`dflashctl runs`: past and present runs, and what was learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.common import DryRunOption, HostOption, JsonOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.config.hosts import Host

app = typer.Typer(help="List past and present runs and what was learnt.", invoke_without_command=True)

LimitOption = Annotated[int, typer.Option("--limit", "-n", help="The newest N runs.", min=1)]
TagOption = Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.")]
RecipeOption = Annotated[str | None, typer.Option("--recipe", "-r", help="Only runs of this recipe.")]
StateOption = Annotated[str | None, typer.Option("--state", help="Only runs in this state: failed, …")]
NameArgument = Annotated[str | None, typer.Argument(help="A tag (its newest run), or a run's id or its end.")]
CodeOption = Annotated[bool, typer.Option("--code", help="The files of its release, with their sha256.")]
LeftArgument = Annotated[str, typer.Argument(help="A tag (its newest run), or a run's id or its end.")]
RightArgument = Annotated[str, typer.Argument(help="The other one.")]
NoteNameArgument = Annotated[str, typer.Argument(help="A tag (its newest run), or a run's id or its end.")]
TextArgument = Annotated[str, typer.Argument(help="What was learnt.")]
KeepOption = Annotated[int, typer.Option("--keep", help="The newest N runs stay.", min=1)]
OlderOption = Annotated[
    str | None, typer.Option("--older-than", help="Only those that ended so long ago: 12h, 30d.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@dataclass(frozen=True)
class Filters:
    limit: int
    tag: str | None
    recipe: str | None
    state: str | None


@app.callback()
def default(
    context: typer.Context,
    host: HostOption = None,
    limit: LimitOption = 20,
    tag: TagOption = None,
    recipe: RecipeOption = None,
    state: StateOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """List past and present runs, the newest first. `runs show NAME` tells everything about one."""
    if context.invoked_subcommand is None:
        _list(host, Filters(limit, tag, recipe, state), json)


@app.command("list")
def list_(
    host: HostOption = None,
    limit: LimitOption = 20,
    tag: TagOption = None,
    recipe: RecipeOption = None,
    state: StateOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """List past and present runs, the newest first."""
    _list(host, Filters(limit, tag, recipe, state), json)


@app.command()
def show(
    name: NameArgument = None,
    code: CodeOption = False,
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
        print_(render.code(shown) if code else render.one(shown))


@app.command()
def diff(
    left: LeftArgument,
    right: RightArgument,
    host: HostOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Compare two runs: code, configuration, environment, outcome; only what differs is shown."""
    from dflashctl.config import load_hosts
    from dflashctl.remote.factory import open_engine
    from dflashctl.render import rundiff as render
    from dflashctl.render.json import emit
    from dflashctl.render.table import show as print_
    from dflashctl.runs.history import show_run
    from dflashctl.runs.rundiff import diff as compare

    with open_engine(load_hosts().host(host)) as engine:
        one, other = show_run(engine, left), show_run(engine, right)
    sections = compare(one, other)
    if json:
        emit("dflashctl.rundiff/1", render.document(one, other, sections))
    else:
        print_(render.side_by_side(one, other, sections))


@app.command()
def note(
    name: NoteNameArgument,
    text: TextArgument,
    host: HostOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write down what was learnt from a run; the list shows it."""
    from dflashctl.config import load_hosts
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.json import emit
    from dflashctl.render.table import say
    from dflashctl.render.text import line
    from dflashctl.runs.history import add_note
    from dflashctl.runs.person import person

    with open_engine(load_hosts().host(host)) as engine:
        answer = add_note(engine, name, text, person())
    if json:
        emit("dflashctl.note/1", {"host": engine.host.name, **answer})
    else:
        say(line(f"noted on {answer.get('tag')} ({answer.get('id')})"))


@app.command()
def prune(
    keep: KeepOption = 50,
    older: OlderOption = None,
    yes: YesOption = False,
    host: HostOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Remove ended runs with their logs and checkpoints; never a live one, nor the newest of a tag."""
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError
    from dflashctl.remote.factory import open_engine
    from dflashctl.render import history as render
    from dflashctl.render.json import emit
    from dflashctl.render.table import show as print_
    from dflashctl.runs.history import prune as remove
    from dflashctl.runs.logsearch import seconds

    older_than_s = None if older is None else seconds(older)
    with open_engine(load_hosts().host(host)) as engine:
        answer = remove(engine, keep=keep, older_than_s=older_than_s, dry_run=True)
        if not dry_run and answer.get("pruned"):
            if not yes:
                if json:
                    raise UsageError("--json cannot ask", next="add --yes, or --dry-run")
                print_(render.pruned(answer, dry_run=True))
                typer.confirm("Remove them?", abort=True, err=True)
            answer = remove(engine, keep=keep, older_than_s=older_than_s, dry_run=False)
    if json:
        emit("dflashctl.prune/1", {"host": engine.host.name, "dry_run": dry_run, **answer})
    else:
        print_(render.pruned(answer, dry_run=dry_run))


def _list(host: str | None, filters: Filters, json: bool) -> None:
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError
    from dflashctl.remote.factory import open_engine
    from dflashctl.render import history as render
    from dflashctl.render.table import show as print_
    from dflashctl.runs.history import list_runs
    from dflashctl.runs.vocabulary import STATES

    if filters.state is not None and filters.state not in STATES:
        raise UsageError(f"no such state: {filters.state}", next=f"they are {', '.join(STATES)}")

    def act(target: Host) -> Outcome:
        with open_engine(target) as engine:
            history = list_runs(
                engine, limit=filters.limit, tag=filters.tag, recipe=filters.recipe, state=filters.state
            )
        if not json:
            print_(render.overview(history))
        return Outcome(render.document(history))

    each_host(load_hosts().hosts(host), act, json=json, schema="dflashctl.runs/1")
