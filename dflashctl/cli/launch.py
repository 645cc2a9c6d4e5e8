"""`dflashctl launch --tag T`: facts, the GPUs' idle gate, one start, its record."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli import offered
from dflashctl.cli.common import DryRunOption, HostOption, JsonOption, RecipeOption, VerboseOption

if TYPE_CHECKING:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.config import ResolvedRecipe
    from dflashctl.config.hosts import Host
    from dflashctl.gpus.choose import Wish
    from dflashctl.gpus.facts import Facts
    from dflashctl.gpus.idle import Gpu
    from dflashctl.releases.here import Here
    from dflashctl.remote.engine import Engine
    from dflashctl.runs.launch import LaunchPlan
    from dflashctl.runs.launching import Attempt

app = typer.Typer()

LOOK_EVERY_S = 5.0
"""With --wait-idle."""

TagOption = Annotated[
    str,
    typer.Option(
        "--tag",
        "-t",
        help="Names the experiment; the recipe's variant of that name applies.",
        autocompletion=offered.variants,
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option("--gpus", help="3 (any three idle), 5,6,7, 0-4, 5, (one), UUIDs, none.", show_default=False),
]
WaitIdleOption = Annotated[
    str | None,
    typer.Option("--wait-idle", help="Wait so long for idle GPUs: 90s, 10m, 2h.", show_default=False),
]
CacheOption = Annotated[bool, typer.Option("--fresh-cache", help="Give the run an empty compile cache.")]
BusyOption = Annotated[bool, typer.Option("--allow-busy", help="Take GPUs that others hold, too.")]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait for the end; exit code 7 if it failed or is wedged.")
]
ReasonOption = Annotated[str, typer.Option("--reason", help="A note for the record.", show_default=False)]


@dataclass(frozen=True)
class Wishes:
    gpus: Wish
    allow_busy: bool
    wait_idle_s: float
    fresh_cache: bool
    wait: bool
    reason: str
    dry_run: bool
    json: bool
    here: Here


@app.command()
def launch(
    tag: TagOption,
    recipe: RecipeOption = None,
    host: HostOption = None,
    gpus: GpusOption = None,
    allow_busy: BusyOption = False,
    wait_idle: WaitIdleOption = None,
    fresh_cache: CacheOption = False,
    wait: WaitOption = False,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Start a tagged run in the background, once its GPUs are free."""
    import os

    from dflashctl.cli.common import load_meanwhile
    from dflashctl.cli.eachhost import each_host
    from dflashctl.config import load_hosts, load_recipe, resolve
    from dflashctl.gpus.choose import surprise, wish_of
    from dflashctl.releases.here import Here
    from dflashctl.remote.factory import open_engine
    from dflashctl.render.secrets import hide
    from dflashctl.runs.durations import parse_duration
    from dflashctl.runs.launch import collect_secrets

    hosts = load_hosts()
    resolved = resolve(load_recipe(recipe, hosts), tag)
    secrets = collect_secrets(resolved.launch.secrets, os.environ)
    hide(resolved.launch.secrets)
    if wished := surprise(gpus):
        _warn(wished)
    wishes = Wishes(
        gpus=wish_of(resolved.launch.gpus, gpus),
        allow_busy=allow_busy,
        wait_idle_s=parse_duration(wait_idle, option="--wait-idle") if wait_idle and not dry_run else 0.0,
        fresh_cache=fresh_cache,
        wait=wait,
        reason=reason,
        dry_run=dry_run,
        json=json,
        here=Here(resolved.source),
    )

    def one(machine: Host) -> Outcome:
        with open_engine(machine) as engine:
            load_meanwhile("rich.console", "dflashctl.cli.launchtext", "dflashctl.gpus.choose")
            return _launch(engine, resolved, secrets, wishes)

    each_host(hosts.hosts(host), one, json=json, schema="dflashctl.launch/1")


def _launch(engine: Engine, recipe: ResolvedRecipe, secrets: dict[str, str], wishes: Wishes) -> Outcome:
    """Looks again while --wait-idle lasts."""
    import sys

    from dflashctl.cli.gputable import print_gpus
    from dflashctl.errors import GpusBusy
    from dflashctl.gpus.choose import NoSuchGpus, choose
    from dflashctl.render.text import duration
    from dflashctl.runs.launch import check_before
    from dflashctl.runs.launching import Attempt

    until = time.monotonic() + wishes.wait_idle_s
    samples = 0 if wishes.gpus.none else engine.host.gpus.idle.samples
    said = False
    while True:
        with Attempt(engine, samples=samples, script=recipe.script, on_wait=_say_waiting) as attempt:
            facts = attempt.facts()
            check_before(engine.host, recipe, facts.inside)
            try:
                gpus = choose(facts.box, wishes.gpus, allow_busy=wishes.allow_busy)
            except GpusBusy as error:
                left = until - time.monotonic()
                if left <= 0 or isinstance(error, NoSuchGpus):
                    print_gpus(facts.box, sys.stderr)
                    raise
                if not said:
                    _warn(f"waiting up to {duration(left)} for GPUs: {error.what}")
                    said = True
            else:
                outcome, plan, ended = _start(attempt, engine, recipe, facts, gpus, secrets, wishes)
                break
        time.sleep(min(LOOK_EVERY_S, left))
    if wishes.wait and plan is not None and outcome.error is None and not ended:
        return _wait(engine, plan, outcome.document, wishes)
    return outcome


def _start(
    attempt: Attempt,
    engine: Engine,
    recipe: ResolvedRecipe,
    facts: Facts,
    gpus: tuple[Gpu, ...],
    secrets: dict[str, str],
    wishes: Wishes,
) -> tuple[Outcome, LaunchPlan | None, bool]:
    """The outcome; the plan, unless it was only shown; and whether the run has ended already."""
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.cli.launchtext import show_answer, show_plan
    from dflashctl.person import person
    from dflashctl.render.secrets import hide_sounding
    from dflashctl.runs.launch import plan_launch

    for warning in facts.box.warnings if gpus else ():
        _warn(f"warning: {warning}")
    for gpu in gpus:
        if gpu.busy:
            _warn(f"warning: GPU {gpu.index} is taken although it is not idle: {gpu.busy}")
    began = time.monotonic()
    plan = plan_launch(
        engine.host,
        recipe,
        run_id=facts.inside["next_id"],
        inside=facts.inside,
        gpus=gpus,
        created_by=person(),
        allow_busy=wishes.allow_busy,
        reason=wishes.reason,
        fresh_cache=wishes.fresh_cache,
        here=wishes.here.release(),
    )
    hide_sounding(plan.record["env"])
    for warning in plan.warnings:
        _warn(f"warning: {warning}")
    if wishes.dry_run:
        return Outcome(show_plan(plan, quiet=wishes.json)), None, True
    try:
        answer = attempt.start(plan, secrets)
    except KeyboardInterrupt:
        _warn(f"run {plan.run_id} may have been started: dflashctl status {recipe.tag}")
        raise
    outcome = show_answer(plan, answer, seconds=time.monotonic() - began, quiet=wishes.json)
    return outcome, plan, answer["exit"] is not None


def _wait(engine: Engine, plan: LaunchPlan, document: dict[str, Any], wishes: Wishes) -> Outcome:
    from dflashctl.cli.eachhost import Outcome
    from dflashctl.cli.launchtext import end_document, show_end
    from dflashctl.runs.waiting import wait

    try:
        end = wait(engine, plan.state_dir, plan.run_id)
    except KeyboardInterrupt:
        tag = plan.record["tag"]
        _warn(f"the run goes on: dflashctl status {tag} · dflashctl kill {tag}")
        raise
    return Outcome({**document, **end_document(end)}, show_end(plan, end, quiet=wishes.json))


def _say_waiting(holder: str) -> None:
    _warn(f"waiting for another launch on this machine ({holder})")


def _warn(text: str) -> None:
    from dflashctl.render.hints import complete
    from dflashctl.render.table import warn

    warn(complete(text))
