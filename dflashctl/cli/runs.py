"""`dflashctl runs`: past and present runs, and what was learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.common import DryRunOption, HostOption, JsonOption, VerboseOption, not_empty, run_argument

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.config.hosts import Host
    from dflashctl.remote.engine import Engine

app = typer.Typer(help="List past and present runs and what was learnt.", invoke_without_command=True)

LimitOption = Annotated[int, typer.Option("--limit", "-n", help="The newest N runs.", min=1)]
TagOption = Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.", callback=not_empty)]
RecipeOption = Annotated[str | None, typer.Option("--recipe", "-r", help="Only runs of this recipe.")]
StateOption = Annotated[str | None, typer.Option("--state", help="Only runs in this state: failed, …")]
BY_NAME = "A tag (its newest run), or a run's id or its end."
NameArgument = Annotated[str | None, run_argument(BY_NAME)]
CodeOption = Annotated[bool, typer.Option("--code", help="The files of its release, with their sha256.")]
LeftArgument = Annotated[str, run_argument(BY_NAME)]
RightArgument = Annotated[str, run_argument("The other one.")]
NoteNameArgument = Annotated[str, run_argument(BY_NAME)]
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
    from dflashctl.cli.onehost import one_host
    from dflashctl.history.listing import show_run
    from dflashctl.views import history as view

    one_host(
        host,
        lambda engine: show_run(engine, name),
        json=json,
        schema="dflashctl.run/1",
        document=view.one_document,
        shown=view.code if code else view.one,
    )


@app.command()
def diff(
    left: LeftArgument,
    right: RightArgument,
    host: HostOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Compare two runs: code, configuration, environment, outcome; only what differs is shown."""
    from dflashctl.cli.onehost import one_host
    from dflashctl.history.listing import show_run
    from dflashctl.history.rundiff import diff as compare
    from dflashctl.views import rundiff as view

    one_host(
        host,
        lambda engine: (show_run(engine, left), show_run(engine, right)),
        json=json,
        schema="dflashctl.rundiff/1",
        document=lambda both: view.document(*both, compare(*both)),
        shown=lambda both: view.side_by_side(*both, compare(*both)),
    )


@app.command()
def note(
    name: NoteNameArgument,
    text: TextArgument,
    host: HostOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write down what was learnt from a run; the list shows it."""
    from dflashctl.cli.onehost import one_host
    from dflashctl.history.listing import add_note
    from dflashctl.person import person
    from dflashctl.views.history import noted

    one_host(
        host,
        lambda engine: {"host": engine.host.name, **add_note(engine, name, text, person())},
        json=json,
        schema="dflashctl.note/1",
        document=dict,
        shown=noted,
    )


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
    from dflashctl.history.listing import prune as remove
    from dflashctl.runs.durations import parse_duration
    from dflashctl.views.history import pruned

    older_than_s = None if older is None else parse_duration(older, option="--older-than")
    change = Change("prune", "pruned", "Remove them?", pruned, dry_run, yes, json)
    _curate(
        host, change, lambda engine, dry: remove(engine, keep=keep, older_than_s=older_than_s, dry_run=dry)
    )


@app.command()
def repair(
    name: NameArgument = None,
    yes: YesOption = False,
    host: HostOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Make damaged files of ended runs readable again: of NAME, or of all. The damaged bytes are kept beside.

    Rebuilt is what the run's other files prove, nothing else; a live run is never touched.
    """
    from dflashctl.history.listing import repair as mend
    from dflashctl.person import person
    from dflashctl.views.history import repaired

    change = Change("repair", "repaired", "Repair them?", repaired, dry_run, yes, json)
    _curate(host, change, lambda engine, dry: mend(engine, name, person(), dry_run=dry))


@dataclass(frozen=True)
class Change:
    """A change of the history, which the person sees before it is made."""

    name: str
    done: str
    """The key of the answer that lists what is done; empty: there is nothing to do."""
    question: str
    shown: Callable[..., object]
    dry_run: bool
    yes: bool
    json: bool

    def make(self, act: Callable[[bool], Mapping[str, Any]]) -> Mapping[str, Any]:
        """`act(True)` says what would be done, `act(False)` does it. Raises UsageError where nobody can be
        asked, and for a no."""
        from dflashctl.cli.ask import ask
        from dflashctl.errors import UsageError
        from dflashctl.render.table import show

        planned = act(True)
        if self.dry_run or not planned.get(self.done):
            return planned
        if not self.yes:
            if self.json:
                raise UsageError("--json cannot ask", next="add --yes, or --dry-run")
            show(self.shown(planned, dry_run=True))
            ask(self.question)
        return act(False)


def _curate(host: str | None, change: Change, act: Callable[[Engine, bool], Mapping[str, Any]]) -> None:
    from dflashctl.cli.onehost import one_host

    def ask(engine: Engine) -> dict[str, Any]:
        made = change.make(lambda dry: act(engine, dry))
        return {"host": engine.host.name, "dry_run": change.dry_run, **made}

    one_host(
        host,
        ask,
        json=change.json,
        schema=f"dflashctl.{change.name}/1",
        document=dict,
        shown=lambda answer: change.shown(answer, dry_run=change.dry_run),
    )


def _list(host: str | None, filters: Filters, json: bool) -> None:
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError
    from dflashctl.history.listing import list_runs
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.table import show as print_
    from dflashctl.runs.vocabulary import STATES
    from dflashctl.views import history as view

    if filters.state is not None and filters.state not in STATES:
        raise UsageError(f"no such state: {filters.state}", next=f"they are {', '.join(STATES)}")

    def act(target: Host) -> Outcome:
        with open_engine(target) as engine:
            history = list_runs(
                engine, limit=filters.limit, tag=filters.tag, recipe=filters.recipe, state=filters.state
            )
        if not json:
            print_(view.overview(history))
        return Outcome(view.document(history))

    each_host(load_hosts().hosts(host), act, json=json, schema="dflashctl.runs/1")
