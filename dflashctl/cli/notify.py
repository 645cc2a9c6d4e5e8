"""`dflashctl notify`: wait with a run, and tell when it has finished, failed, is wedged or lost."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption, run_argument

if TYPE_CHECKING:
    from dflashctl.runs.notifiers import Notifier

app = typer.Typer()
TagArgument = Annotated[str | None, run_argument("A run's tag; without it all runs of the host.")]
CommandOption = Annotated[
    str | None,
    typer.Option("--command", "-c", help="Program to call; it gets JSON on stdin.", show_default=False),
]
WEBHOOK_VARIABLE = "DFLASHCTL_WEBHOOK"
"""The address may hold a secret, so it is no option: every process list would show it."""

DesktopOption = Annotated[bool, typer.Option("--desktop/--no-desktop", help="Show it on the desktop.")]
EveryOption = Annotated[float, typer.Option("--every", help="Seconds between two looks.", min=0.2)]


@app.command()
def notify(
    tag: TagArgument = None,
    command: CommandOption = None,
    desktop: DesktopOption = True,
    every: EveryOption = 15.0,
    host: HostOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Wait until the run has ended; tell when it finished, failed, is wedged or lost, each once.

    Lost contact is survived and is no news. The address in DFLASHCTL_WEBHOOK gets each as JSON by POST.
    """
    from dflashctl.config import load_hosts
    from dflashctl.render.hints import complete
    from dflashctl.render.json import document
    from dflashctl.render.table import say, warn
    from dflashctl.render.text import line
    from dflashctl.runs.notify import Once
    from dflashctl.runs.watch import watch

    target = load_hosts().host(host)
    channels = _channels(command, os.environ.get(WEBHOOK_VARIABLE), desktop)
    once, last, said = Once(), None, bool(channels) or json
    for last in watch(target, tag=tag, every_s=every):
        if not said:  # not before the tag is known to be right
            said = True
            warn("no desktop, --command or DFLASHCTL_WEBHOOK: it is told here alone")
        for news in once.news(last):
            if json:
                body = {key: value for key, value in news.document().items() if key != "schema"}
                sys.stdout.write(document("dflashctl.news/1", body) + "\n")
                sys.stdout.flush()
            else:
                clock = time.strftime("%H:%M:%S")
                say(line(f"{clock}  {news.title}: {'; '.join(news.evidence[:3])}"))
            for send in channels:
                problem = send(news)
                if problem:
                    warn(line(f"not delivered: {problem}"))
    if last is not None and last.rows and once.before.issuperset(row.facts.id for row in last.rows):
        names = ", ".join(row.facts.name for row in last.rows)
        warn(line(complete(f"{names} had ended before: nothing is told; dflashctl status")))
    if not json and last is not None:
        ended = ", ".join(f"{row.facts.name} {row.verdict.state}" for row in last.rows)
        say(line(f"over: {ended or 'nothing was running'}"))


def _channels(command: str | None, webhook: str | None, desktop: bool) -> list[Notifier]:
    from dflashctl.runs import notifiers

    chosen = [notifiers.desktop()] if desktop else []
    if command is not None:
        chosen.append(notifiers.command(command))
    if webhook:
        chosen.append(notifiers.webhook(webhook))
    return [each for each in chosen if each is not None]
