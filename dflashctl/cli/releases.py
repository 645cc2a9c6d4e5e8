"""`dflashctl releases`: what is deployed, and what can be gone back to."""

from __future__ import annotations

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption

app = typer.Typer()


@app.command()
def releases(host: HostOption = None, json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """List the releases that are there, the newest first."""
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts
    from dflashctl.config.hosts import Host
    from dflashctl.releases.listing import overview, read_releases
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.table import print_table, say
    from dflashctl.views.releases import COLUMNS, cells

    def act(target: Host) -> Outcome:
        with open_engine(target) as engine:
            facts = read_releases(engine)
        rows = overview(facts)
        if not json:
            say(f"{target.name} · {target.code_root}" + ("" if rows else ": nothing is deployed"))
            if rows:
                print_table(COLUMNS, [cells(row) for row in rows])
        document = {"current": facts["current"], "previous": facts["previous"]}
        return Outcome({"host": target.name, **document, "releases": [row.payload() for row in rows]})

    each_host(load_hosts().hosts(host), act, json=json, schema="dflashctl.releases/1")
