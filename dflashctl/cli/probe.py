"""`dflashctl probe`: the framework's faults, reproduced in small programs or a person's own, on an idle
GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.common import DryRunOption, HostOption, JsonOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.config.hosts import Host
    from dflashctl.gpus.choose import Wish
    from dflashctl.probe.plan import Work
    from dflashctl.probe.running import Started

app = typer.Typer()

WhatArgument = Annotated[str, typer.Argument(help="threads, step, p2p, ipc, nccl, or a Python file.")]
ArgumentsArgument = Annotated[
    list[str] | None, typer.Argument(help="The file's own arguments, after --.", show_default=False)
]
GpuOption = Annotated[
    int | None, typer.Option("--gpu", min=0, help="On this GPU, if it is idle.", show_default=False)
]
GpusOption = Annotated[
    str | None, typer.Option("--gpus", help="As for launch: 2, 5,6, 0-3, UUIDs, none.", show_default=False)
]
CaseOption = Annotated[
    str | None, typer.Option("--case", help="Only these cases of the probe: a,b.", show_default=False)
]
DeadlineOption = Annotated[
    str | None,
    typer.Option(
        "--deadline", help="For each program: 90s, 10m (default 5m; a file 10m).", show_default=False
    ),
]
TagOption = Annotated[
    str | None, typer.Option("--tag", "-t", help="Default: probe-<what>.", show_default=False)
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", help="NAME=VALUE for the programs; repeatable.", show_default=False),
]

DEADLINE_S = 300.0
FILE_DEADLINE_S = 600.0


@app.command()
def probe(
    what: WhatArgument,
    arguments: ArgumentsArgument = None,
    gpu: GpuOption = None,
    gpus: GpusOption = None,
    case: CaseOption = None,
    deadline: DeadlineOption = None,
    tag: TagOption = None,
    env: EnvOption = None,
    host: HostOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Reproduce a framework fault on an idle GPU, in small programs or your own."""
    from dflashctl.cli.eachhost import each_host
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError
    from dflashctl.gpus.choose import Wish, parse
    from dflashctl.probe.document import SCHEMA
    from dflashctl.remote.factory import open_engine

    if gpu is not None and gpus is not None:
        raise UsageError("give either --gpu or --gpus")
    wish = Wish(names=(gpu,)) if gpu is not None else parse(gpus) if gpus is not None else None
    work = _work(what, arguments or [], case, deadline, tag, env or [])

    def one(machine: Host) -> Outcome:
        with open_engine(machine) as engine:
            return _probe(engine, work, wish, dry_run=dry_run, json=json)

    each_host(load_hosts().hosts(host), one, json=json, schema=SCHEMA)


def _work(
    what: str,
    arguments: list[str],
    case: str | None,
    deadline: str | None,
    tag: str | None,
    env: list[str],
) -> Work:
    from pathlib import Path

    from dflashctl.errors import NotFound, UsageError
    from dflashctl.probe.cases import PROBES
    from dflashctl.probe.plan import of_file, of_probe, variables
    from dflashctl.runs.durations import parse_duration

    seconds = parse_duration(deadline, option="--deadline") if deadline else None
    given = variables(env)
    if what in PROBES:
        if arguments:
            raise UsageError(f"probe {what} takes no arguments", next="dflashctl probe --help")
        return of_probe(PROBES[what], case, tag=tag, deadline_s=seconds or DEADLINE_S, env=given)
    path = Path(what).expanduser()
    if not path.is_file():
        raise NotFound(
            f"no probe and no file is named {what!r}",
            next=f"the probes: {', '.join(PROBES)}; or a Python file",
        )
    if case is not None:
        raise UsageError("--case is for the probes that have cases; a file is one program")
    try:
        text = path.read_text(encoding="utf-8")
        compile(text, what, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(
            f"{what} is no Python program: {error}", next="correct it; nothing was sent"
        ) from None
    return of_file(path.name, text, arguments, tag=tag, deadline_s=seconds or FILE_DEADLINE_S, env=given)


def _probe(engine: Any, work: Work, wish: Wish | None, *, dry_run: bool, json: bool) -> Outcome:
    from dflashctl.cli.probetext import announce, ask_file, ask_probe, show_dry_run
    from dflashctl.probe.running import start
    from dflashctl.render.table import warn

    started: Started | None = None
    try:
        started = start(
            engine,
            work,
            wish,
            dry_run=dry_run,
            on_wait=lambda holder: warn(f"waiting for another launch on this machine ({holder})"),
        )
        if dry_run:
            return show_dry_run(work, started, json=json)
        announce(engine, work, started, json=json)
        return (ask_file if work.snippet else ask_probe)(engine, work, started, json=json)
    except KeyboardInterrupt:
        if not dry_run:
            what = (
                "goes on"
                if started
                else f"may have been started (dflashctl status {work.tag}), then it goes on"
            )
            warn(f"the probe {what} and ends by itself: dflashctl kill {work.tag}")
        raise
