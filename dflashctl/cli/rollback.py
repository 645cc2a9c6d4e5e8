"""`dflashctl rollback [RELEASE]`: make an older release current again."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.common import DryRunOption, HostOption, JsonOption, VerboseOption
from dflashctl.cli.deploy import WaitOption

app = typer.Typer()


@app.command()
def rollback(
    release: Annotated[
        str | None, typer.Argument(help="A release or its beginning; the one before without.")
    ] = None,
    host: HostOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    wait: WaitOption = 0.0,
    verbose: VerboseOption = False,
) -> None:
    """Make an older release current again, after proving that it is still what it was.

    Live runs go on with the release that they were launched from.
    """
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts
    from dflashctl.config.hosts import Host
    from dflashctl.releases.listing import check_name, roll_back
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.table import say
    from dflashctl.views.releases import rollback_report

    wanted = check_name(release)

    def act(target: Host) -> Outcome:
        with open_engine(target) as engine:
            answer = roll_back(engine, wanted, wait_s=wait, dry_run=dry_run)
        if not json:
            say(f"{target.name} · {answer['recipe'] or '-'} · release {answer['release'][:8]}")
            say(rollback_report(answer, dry_run=dry_run))
        return Outcome({"host": target.name, "dry_run": dry_run, **answer})

    each_host(load_hosts().hosts(host), act, json=json, schema="dflashctl.rollback/1")
