"""`dflashctl lab`: the embedded test host on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.common import JsonOption

if TYPE_CHECKING:
    from dflashctl.lab.lifecycle import Status

app = typer.Typer(
    help="The embedded test host: a Proxmox stand-in on this machine, without root, GPU or Docker.",
    no_args_is_help=True,
)
KeepOption = Annotated[bool, typer.Option("--keep", help="Keep the containers' disks for the next `lab up`.")]


@app.command()
def up(json: JsonOption = False) -> None:
    """Start the lab, or say that it is up; start its container when that has stopped."""
    import shlex

    from dflashctl.lab import lifecycle
    from dflashctl.render.json import emit
    from dflashctl.render.text import line

    made = lifecycle.up(_start_container)
    status = lifecycle.status()
    if json:
        emit("dflashctl.lab/1", {**_payload(status), "already_up": made.already, "seconds": made.seconds})
        return
    if made.cleaned:
        print("removed what an earlier lab had left behind")
    if made.started_container:
        print("its container was stopped, and has been started")
    _show(status)
    print("the lab was up already" if made.already else f"lab up in {made.seconds:.1f} s")
    print(f"by hand: {line(shlex.join(lifecycle.ssh_argv(made.record.endpoint)))}")


def _start_container() -> None:
    """A lab whose container ended serves nobody, and its host is out of a person's daily reach."""
    from dflashctl.config.hosts import HostEntry, complete
    from dflashctl.errors import ContainerDown
    from dflashctl.lab.layout import CONTAINER
    from dflashctl.remote.factory import open_engine

    with open_engine(complete("lab", HostEntry(engine="lab"))) as engine:
        done = engine.run_on_host(["pct", "start", str(CONTAINER)], timeout_s=30)
    if done.exit_code != 0:
        raise ContainerDown(
            f"the lab's container {CONTAINER} does not start: {done.stderr.decode(errors='replace').strip()}",
            next="dflashctl lab down, then dflashctl lab up",
        )


@app.command()
def down(keep: KeepOption = False, json: JsonOption = False) -> None:
    """End the lab and remove everything of it."""
    from dflashctl.lab import lifecycle
    from dflashctl.render.json import emit
    from dflashctl.render.text import line

    runs = lifecycle.open_runs()
    ended = lifecycle.down(keep=keep)
    if json:
        emit("dflashctl.lab/1", {"up": False, "was_there": ended, "runs": runs})
        return
    kept = ", its containers' disks kept" if keep and ended else ""
    print(f"the lab is down{kept}" if ended else "the lab was not up")
    if ended and runs:
        print(line(f"runs that ended with it: {', '.join(runs)}"))


@app.command()
def status(json: JsonOption = False) -> None:
    """Say whether the lab is up and where."""
    from dflashctl.lab import lifecycle
    from dflashctl.render.json import emit

    found = lifecycle.status()
    if json:
        emit("dflashctl.lab/1", _payload(found))
        return
    _show(found)
    if found.record is None:
        print("next: dflashctl lab up")


def _show(found: Status) -> None:
    from dflashctl.render.text import line

    print(f"lab         {found.word}")
    if found.record is None:
        return
    endpoint = found.record.endpoint
    rows = {
        "host": f"{endpoint.user}@{endpoint.host}, port {endpoint.port}",
        "container": f"{endpoint.container}, {'running' if found.container_running else 'stopped'}",
        "python": endpoint.python,
        "home": endpoint.home,
        "gpus": f"{found.gpus} simulated",
        "folder": found.folder,
    }
    for name, value in rows.items():
        print(f"{name:<11} {line(value)}")


def _payload(found: Status) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "up": found.record is not None,
        "state": found.word,
        "folder": found.folder,
        "container_running": found.container_running,
        "gpus": found.gpus,
        "endpoint": None if found.record is None else asdict(found.record.endpoint),
        "pid": None if found.record is None else found.record.pid,
        "started_at": None if found.record is None else found.record.started_at,
    }
