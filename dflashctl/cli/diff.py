"""`dflashctl diff [RELEASE]`: the files here against those of a release, and what was changed there in
place."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, RecipeOption, VerboseOption

app = typer.Typer()


@app.command()
def diff(
    release: Annotated[
        str | None, typer.Argument(help="A release or its beginning; the current one without.")
    ] = None,
    host: HostOption = None,
    recipe: RecipeOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show what a deploy would change, as a unified diff, and what somebody changed inside since the last
    one."""
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts, load_recipe
    from dflashctl.config.hosts import Host
    from dflashctl.releases.deploy import read_source
    from dflashctl.releases.diff import compare, read_there
    from dflashctl.releases.listing import check_name
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.table import show
    from dflashctl.views.releases import diff_text

    wanted = check_name(release)
    hosts = load_hosts()
    source = read_source(load_recipe(recipe, hosts))

    def act(target: Host) -> Outcome:
        with open_engine(target) as engine:
            facts = read_there(engine, source, wanted)
        found = compare(source, facts)
        if not json:
            show(diff_text(found))
        files = [file.payload() for file in found.files]
        return Outcome(
            {"host": target.name, "release": found.release, "files": files, "drift": list(found.drift)}
        )

    each_host(hosts.hosts(host), act, json=json, schema="dflashctl.diff/1")
