"""`dflashctl pull`: bring home a run's checkpoints, metrics or log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dflashctl.cli.common import HostOption, JsonOption, VerboseOption, run_argument

app = typer.Typer()
TagArgument = Annotated[str, run_argument("A run's tag or id.")]
WhatOption = Annotated[str, typer.Option("--what", help="checkpoints, metrics or log.")]
ToOption = Annotated[
    Path | None, typer.Option("--to", help="Folder (pulled/TAG/ID/WHAT).", show_default=False)
]


@app.command()
def pull(
    tag: TagArgument,
    what: WhatOption = "checkpoints",
    to: ToOption = None,
    host: HostOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Copy what a run left to this machine: resumed where it broke off, verified, never over a newer file."""
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError, VerificationFailed
    from dflashctl.history.pull import WHAT
    from dflashctl.history.pull import pull as fetch
    from dflashctl.render.json import emit
    from dflashctl.render.table import say, warn
    from dflashctl.render.text import line, plural, size

    chosen = next((each for each in WHAT if each == what), None)
    if chosen is None:
        raise UsageError(f"nothing called {what!r} can be pulled", next=f"one of {', '.join(WHAT)}")
    target = load_hosts().host(host)
    live = sys.stderr.isatty() and not json

    def told(path: str, done: int, whole: int) -> None:
        if live:
            sys.stderr.write(f"\r\x1b[K{line(path)}  {size(done)} of {size(whole)}")
            sys.stderr.flush()

    result = fetch(target, tag=tag, what=chosen, into=to, told=told)
    if live:
        sys.stderr.write("\r\x1b[K")
    if json:
        emit(
            "dflashctl.pull/1",
            {
                "host": target.name,
                "id": result.id,
                "tag": result.tag,
                "folder": str(result.folder),
                "bytes": result.bytes,
                "fetched": result.fetched,
                "same": result.same,
                "linked": result.linked,
                "gone": result.gone,
                "refused": [{"path": path, "why": why} for path, why in result.refused],
            },
        )
    else:
        got = plural(len(result.fetched) + len(result.linked), "file")
        say(line(f"{got}, {size(result.bytes)}, verified by sha256 -> {result.folder}"))
        if result.same:
            say(f"{plural(len(result.same), 'file')} here already")
        if result.gone:
            folders = ", ".join(dict.fromkeys(path.partition("/")[0] for path in result.gone))
            what = f"{plural(len(result.gone), 'file')} removed there meanwhile, so not whole here"
            warn(line(f"{what}: {folders}"))
        for path, why in result.refused:
            warn(line(f"refused: {path}: {why}"))
    if result.as_base64:
        warn("something on the way changes bytes: they came as base64, two to three times as slowly")
    if result.refused:
        raise VerificationFailed(
            f"{plural(len(result.refused), 'file')} refused",
            where=target.name,
            next="the reasons are above; --to names another folder",
        )
