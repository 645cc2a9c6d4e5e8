"""`dflashctl lock show` and `dflashctl lock break`: who is deploying, and ending that."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption

app = typer.Typer(help="The deploy lock: show, break.", no_args_is_help=True)


@app.command()
def show(host: HostOption = None, json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """Say who is deploying: who, what, where, since when."""
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts
    from dflashctl.config.hosts import Host
    from dflashctl.releases.listing import show_lock
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.table import say
    from dflashctl.views.releases import lock_words

    def act(target: Host) -> Outcome:
        with open_engine(target) as engine:
            answer = show_lock(engine)
        if not json:
            say(lock_words(target.name, answer["holder"]))
        return Outcome({"host": target.name, **answer})

    each_host(load_hosts().hosts(host), act, json=json, schema="dflashctl.lock/1")


@app.command("break")
def break_(
    host: HostOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """End the deploy that holds the lock; it switches nothing and takes back what it had sent.

    The lock of a deploy that died is free by itself: this is for one that lives and should not.
    """
    from dflashctl.cli.ask import ask
    from dflashctl.cli.eachhost import Outcome, each_host
    from dflashctl.config import load_hosts
    from dflashctl.config.hosts import Host
    from dflashctl.releases.listing import break_lock, show_lock
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.table import say
    from dflashctl.views.releases import lock_words

    def act(target: Host) -> Outcome:
        with open_engine(target) as engine:
            shown = show_lock(engine)
            if not json:
                say(lock_words(target.name, shown["holder"]))
            if shown["holder"] is None:
                return Outcome({"host": target.name, "holder": None, "killed": False})
            if not yes:
                ask("End that deploy?", where=target.name, instead="talk to them, or give --yes")
            answer = break_lock(engine, shown["holder"])
        if not json:
            say("the lock is free" + ("; its holder had to be killed" if answer["killed"] else ""))
        return Outcome({"host": target.name, **answer})

    each_host(load_hosts().hosts(host), act, json=json, schema="dflashctl.lock/1")
