"""`dflashctl deploy`: ship the recipe's code and prove inside that it arrived."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.common import DryRunOption, HostOption, JsonOption, RecipeOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.config.hosts import Host
    from dflashctl.releases.deploy import Phase, Source
    from dflashctl.remote.engine import Progress

app = typer.Typer()
WaitOption = Annotated[
    float, typer.Option("--wait", help="Seconds to wait when somebody else is deploying there.", min=0)
]


@app.command()
def deploy(
    host: HostOption = None,
    recipe: RecipeOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    wait: WaitOption = 0.0,
    verbose: VerboseOption = False,
) -> None:
    """Ship the recipe's code and prove inside that it arrived; only then make it current.

    Nothing is switched before every byte, every compile, the expected lines and the import are proven.
    """
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts, load_recipe
    from dflashctl.releases.deploy import read_source

    hosts = load_hosts()
    targets = hosts.hosts(host)
    source = read_source(load_recipe(recipe, hosts))

    def act(target: Host) -> Outcome:
        done = _plan_only(target, source, json) if dry_run else _deploy(target, source, json, wait)
        return Outcome({"host": target.name, "recipe": source.recipe.name, "dry_run": dry_run, **done})

    each_host(targets, act, json=json, schema="dflashctl.deploy/1")


def _title(host: Host, source: Source) -> None:
    from dflashctl.render.table import say
    from dflashctl.views.deploy import title

    git, changed = source.git()
    say(title(host.name, source.recipe.name, source.snapshot.release, git, changed))


def _plan_only(host: Host, source: Source, json: bool) -> dict[str, Any]:
    from dflashctl.releases.deploy import plan
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.table import say
    from dflashctl.views.deploy import plan_payload, plan_report

    with open_engine(host) as engine:
        planned = plan(engine, source)
    if not json:
        _title(host, source)
        say(plan_report(planned))
    return plan_payload(planned)


def _deploy(host: Host, source: Source, json: bool, wait_s: float) -> dict[str, Any]:
    from dflashctl.releases.deploy import deploy as act
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.table import say, warn
    from dflashctl.views.deploy import deployed_payload, report, warnings

    if not json:
        _title(host, source)
    try:
        with open_engine(host) as engine, _progress() as (progress, phase):
            done = act(engine, source, wait_s=wait_s, progress=progress, phase=phase)
    except KeyboardInterrupt as stop:
        for note in getattr(stop, "__notes__", []):
            warn(note)
        raise
    notes = [*done.plan.warnings, *done.proof["warnings"]]
    if notes:
        warn(warnings(notes))
    if not json:
        say(report(done))
    return deployed_payload(done)


@contextmanager
def _progress() -> Iterator[tuple[Progress | None, Phase | None]]:
    """On a terminal: a bar for the bytes, then the step that runs inside. It vanishes when it is done."""
    import sys

    if not sys.stderr.isatty():
        yield None, None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("  {task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sending", total=None, visible=False)
        yield (
            lambda done, total: bar.update(task, completed=done, total=total, visible=True),
            lambda name: bar.update(task, description=name),
        )
