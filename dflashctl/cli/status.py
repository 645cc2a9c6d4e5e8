"""`dflashctl status`: what every run is doing, with the evidence."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption, run_argument

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.config.hosts import Host
    from dflashctl.runs.status import Look

app = typer.Typer()
SCHEMA = "dflashctl.status/1"

TagArgument = Annotated[str | None, run_argument("A run's tag or id; without it all runs of today.")]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Look again and again until the runs end.")]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Exit with 7 when a run failed, is wedged or lost.")
]
EveryOption = Annotated[float, typer.Option("--every", help="Seconds between two looks.", min=0.2)]


@app.command()
def status(
    tag: TagArgument = None,
    host: HostOption = None,
    watch: WatchOption = False,
    every: EveryOption = 2.0,
    check: CheckOption = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Say what every run is doing, with the evidence: live runs and those that ended in the last day.

    No contact makes a run `unknown`, never `failed`.
    """
    from dflashctl.cli.eachhost import each_host
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError

    targets = load_hosts().hosts(host)
    if watch and len(targets) > 1:
        raise UsageError("--watch follows one host", next="give one name to --host")

    def act(target: Host) -> Outcome:
        if watch:
            return _outcome(_watch(target, tag, every, json), check, _hinted(tag, json))
        return _once(target, tag, check, quiet=json)

    each_host(targets, act, json=json, schema=SCHEMA)


def _once(host: Host, tag: str | None, check: bool, *, quiet: bool) -> Outcome:
    from dflashctl.cli.common import load_meanwhile
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.errors import ContainerDown, Unreachable
    from dflashctl.remote.factory import open_engine
    from dflashctl.runs.status import Memory, look, without_contact
    from dflashctl.views.status import document

    try:
        with open_engine(host) as engine:
            load_meanwhile("rich.console", "rich.table")
            seen = look(engine, tag=tag)
    except (Unreachable, ContainerDown) as error:
        seen = without_contact(host, error, Memory(), tag)
        _show(seen, tag, quiet)
        return Outcome(document(seen), error)
    _show(seen, tag, quiet)
    return _outcome(seen, check, _hinted(tag, quiet))


def _show(seen: Look, tag: str | None, quiet: bool) -> None:
    from dflashctl.render.table import show
    from dflashctl.views import status as view

    if quiet:
        return
    if tag is not None and len(seen.rows) == 1:
        show(view.details(seen, seen.rows[0]))
    else:
        show(view.overview(seen))


def _hinted(tag: str | None, quiet: bool) -> bool:
    """The details of a run end with what to do next; the error that follows them need not say it again."""
    return tag is not None and not quiet


def _outcome(seen: Look, check: bool, hinted: bool) -> Outcome:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.errors import RunBad
    from dflashctl.views.status import document

    if not check or not seen.bad:
        return Outcome(document(seen))
    said = ", ".join(f"{row.facts.name} {row.verdict.state}" for row in seen.bad)
    hint = "" if hinted else next((" · ".join(row.verdict.next) for row in seen.bad if row.verdict.next), "")
    return Outcome(document(seen), RunBad(said, where=seen.host, next=hint))


def _watch(host: Host, tag: str | None, every_s: float, quiet: bool) -> Look:
    """The last look. On a terminal one live table; elsewhere a line for each change."""
    from dflashctl.runs.watch import watch
    from dflashctl.views.watchview import Lines, Live

    last: Look | None = None
    if sys.stdout.isatty() and not quiet:
        with Live() as live:
            for last in watch(host, tag=tag, every_s=every_s):
                live.update(last)
    else:
        lines = Lines()
        for last in watch(host, tag=tag, every_s=every_s):
            if not quiet:
                lines.update(last)
    assert last is not None  # the first look succeeds or raises
    if not quiet:
        _show(last, tag, quiet=False)
    return last
