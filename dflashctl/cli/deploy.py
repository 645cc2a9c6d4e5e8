"""`dflashctl deploy`: ship the recipe's code and prove inside that it arrived."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.common import DryRunOption, HostOption, JsonOption, RecipeOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.config.hosts import Host
    from dflashctl.errors import DflashError
    from dflashctl.remote.engine import Progress
    from dflashctl.runs.deploy import Source

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
    from dflashctl.config import load_hosts, load_recipe
    from dflashctl.errors import DflashError
    from dflashctl.render.json import emit
    from dflashctl.runs.deploy import read_source

    hosts = load_hosts()
    targets = hosts.hosts(host)
    source = read_source(load_recipe(recipe, hosts))
    results: list[dict[str, Any]] = []
    failures: list[tuple[Host, DflashError]] = []
    for number, target in enumerate(targets):
        if number and not json:
            print()
        try:
            results.append(_deploy_one(target, source, dry_run=dry_run, quiet=json, wait_s=wait))
        except DflashError as error:
            if len(targets) == 1:
                raise
            failures.append((target, error))
            results.append(_failure(target, error, quiet=json))
    if json:
        emit("dflashctl.deploy/1", {"recipe": source.recipe.name, "dry_run": dry_run, "hosts": results})
    _judge(failures, len(targets))


def _deploy_one(host: Host, source: Source, *, dry_run: bool, quiet: bool, wait_s: float) -> dict[str, Any]:
    from dflashctl.remote.factory import open_engine
    from dflashctl.render import deploy as render
    from dflashctl.render.table import say, warn
    from dflashctl.runs import deploy as runs

    git, changed = source.git()
    if not quiet:
        say(render.title(host.name, source.recipe.name, source.snapshot.release, git, changed))
    with open_engine(host) as engine:
        if dry_run:
            planned = runs.plan(engine, source)
            if not quiet:
                say(render.plan_report(planned))
            return {"host": host.name, "ok": True, **render.plan_payload(planned)}
        with _progress(quiet) as progress:
            done = runs.deploy(engine, source, wait_s=wait_s, progress=progress)
    notes = [*done.plan.warnings, *done.proof["warnings"]]
    if notes:
        warn(render.warnings(notes))
    if not quiet:
        say(render.report(done))
    return render.deployed_payload(done)


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A bar for the bytes on a terminal; it vanishes when it is done."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("  sending", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("send", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _failure(host: Host, error: DflashError, *, quiet: bool) -> dict[str, Any]:
    from dflashctl.render.table import say

    if not quiet:
        import sys

        say(f"error: {error}", file=sys.stderr)
    body = {"what": error.what, "where": error.where, "next": error.next, "exit_code": int(error.exit_code)}
    return {"host": host.name, "ok": False, "error": body}


def _judge(failures: list[tuple[Host, DflashError]], total: int) -> None:
    if failures:
        from dflashctl.errors import SomeHostsFailed

        names = ", ".join(host.name for host, _ in failures)
        raise SomeHostsFailed(f"{len(failures)} of {total} hosts failed: {names}")
