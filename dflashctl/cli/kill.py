"""`dflashctl kill [TAG]`: end the run with its whole family, then prove its GPUs free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.common import DryRunOption, HostOption, JsonOption, VerboseOption, run_argument

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.config.hosts import Host
    from dflashctl.remote.engine import Engine

app = typer.Typer()

TagArgument = Annotated[str | None, run_argument("Tag or id of the run; the only live one if left out.")]
AllOption = Annotated[bool, typer.Option("--all", help="Every live run of the host.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="A note for the record.", show_default=False)]
GraceOption = Annotated[
    float | None,
    typer.Option(
        "--grace",
        min=0,
        max=3600,
        help="Seconds from TERM to KILL (the recipe's).",
        show_default=False,
    ),
]


PidOption = Annotated[
    int | None,
    typer.Option(
        "--pid", min=2, help="A process inside that belongs to no run (see gpu).", show_default=False
    ),
]
StacksOption = Annotated[
    bool, typer.Option("--stacks", help="First show where every process stands in its code.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="With --pid: do not ask.")]


@dataclass(frozen=True)
class Wishes:
    tag: str | None
    everything: bool
    reason: str
    grace_s: float | None
    dry_run: bool
    json: bool
    stacks: bool


@app.command()
def kill(
    tag: TagArgument = None,
    everything: AllOption = False,
    reason: ReasonOption = "",
    grace: GraceOption = None,
    stacks: StacksOption = False,
    pid: PidOption = None,
    yes: YesOption = False,
    host: HostOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """End a run with its whole family and prove its GPUs free."""
    from dflashctl.cli.eachhost import each_host
    from dflashctl.config import load_hosts
    from dflashctl.errors import UsageError
    from dflashctl.remote.factory import open_engine

    if sum((everything, tag is not None, pid is not None)) > 1:
        raise UsageError("give only one of a tag, --all and --pid")
    if stacks and pid is not None:
        raise UsageError("--stacks shows a run's processes; it does not go with --pid")
    if yes and pid is None:
        raise UsageError("--yes belongs to --pid: a run is ended without a question")
    wishes = Wishes(tag, everything, reason, grace, dry_run, json, stacks)

    def one(machine: Host) -> Outcome:
        with open_engine(machine) as engine:
            if pid is not None:
                from dflashctl.cli.killpid import kill_pid

                return kill_pid(engine, pid, yes=yes, dry_run=dry_run, grace_s=grace, json=json)
            return _kill(engine, wishes)

    each_host(load_hosts().hosts(host), one, json=json, schema="dflashctl.kill/1")


def _kill(engine: Engine, wishes: Wishes) -> Outcome:
    from dflashctl.cli import killtext
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.gpus.facts import ask_inside
    from dflashctl.runs import stopping
    from dflashctl.runs.stop import choose_targets, not_done

    host = engine.host.name
    targets = choose_targets(ask_inside(engine)["runs"], wishes.tag, everything=wishes.everything, host=host)
    if wishes.dry_run:
        return Outcome(killtext.show_targets(host, wishes.tag, targets, quiet=wishes.json))
    graces = {str(run["id"]): run.get("grace_s") for run in targets}
    names = list(graces) or ([wishes.tag] if wishes.tag else [])
    stacks = [killtext.show_stacks(engine, run, quiet=wishes.json) for run in targets if wishes.stacks]
    stopped = []
    for name in names:
        try:
            answer = _stop(engine, name, graces.get(name), wishes)
        except KeyboardInterrupt:
            killtext.show_interrupted(name, targets)
            raise
        killtext.show_stopped(host, answer, quiet=wishes.json)
        stopped.append(answer)
    ended_now = [answer for answer in stopped if answer["outcome"] != "already_ended"]
    gpus = [gpu for answer in ended_now for gpu in answer["gpus"]]
    freed = stopping.prove_freed(engine, gpus, [answer["id"] for answer in ended_now]) if gpus else []
    document = killtext.show_freed(host, stopped, freed, quiet=wishes.json)
    if stacks:
        document["stacks"] = stacks
    return Outcome(document, not_done(host, stopped, freed))


def _stop(engine: Engine, name: str, recipe_grace_s: Any, wishes: Wishes) -> dict[str, Any]:
    from dflashctl.cli.killtext import show_event
    from dflashctl.person import person
    from dflashctl.runs.stopping import DEFAULT_GRACE_S, stop

    grace_s = float(recipe_grace_s or DEFAULT_GRACE_S) if wishes.grace_s is None else wishes.grace_s
    return stop(
        engine,
        name,
        who=person(),
        reason=wishes.reason,
        grace_s=grace_s,
        on_event=(lambda event: None) if wishes.json else show_event,
    )
