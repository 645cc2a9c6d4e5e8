"""A probe from its start to its end: two remote commands that launch it as a run, one that watches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflashctl.errors import RunBad, Unreachable
from dflashctl.gpus.choose import Wish
from dflashctl.person import person
from dflashctl.probe.plan import Work, gpus_for
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.runs.ending import End
from dflashctl.runs.launch import LaunchPlan, check_before, plan_launch
from dflashctl.runs.launching import Attempt

SLACK_S = 30.0


@dataclass(frozen=True)
class Started:
    """`note`: why it has no GPU. `answer`: of the operation launch; None with --dry-run."""

    plan: LaunchPlan
    note: str
    answer: Mapping[str, Any] | None


@dataclass(frozen=True)
class Watched:
    """`lines`: of probe.jsonl."""

    lines: tuple[Mapping[str, Any], ...]
    end: End


def start(
    engine: Engine,
    work: Work,
    wish: Wish | None,
    *,
    dry_run: bool = False,
    on_wait: Callable[[str], None] = lambda holder: None,
) -> Started:
    """Launch it on idle GPUs. `wish`: the person's; None: the probe's own. Raises GpusBusy, Locked (its tag
    is in use), RunBad (it did not start), and what an agent call raises."""
    samples = 0 if wish is not None and wish.none else engine.host.gpus.idle.samples
    with Attempt(engine, samples=samples, on_wait=on_wait) as attempt:
        facts = attempt.facts()
        recipe = work.recipe()
        check_before(engine.host, recipe, facts.inside)
        want = work.probe.gpus if work.probe else 1
        gpus, note = gpus_for(facts.box, facts.host, wish, want)
        plan = plan_launch(
            engine.host,
            recipe,
            run_id=facts.inside["next_id"],
            inside=facts.inside,
            gpus=gpus,
            created_by=person(),
        )
        plan = replace(plan, files=work.files(f"{engine.host.state_dir}/runs/{plan.run_id}"))
        if dry_run:
            return Started(plan, note, None)
        answer = attempt.start(plan, {})
    if answer["outcome"] in ("failed", "starting"):
        why = answer["why"] or "its supervisor has not said a word yet"
        raise RunBad(f"{work.tag} did not start: {why}", where=engine.host.name, next="dflashctl runs")
    return Started(plan, note, answer)


def watch(
    engine: Engine,
    plan: LaunchPlan,
    work: Work,
    *,
    on_line: Callable[[Mapping[str, Any]], None] = lambda line: None,
    on_log: Callable[[str], None] | None = None,
) -> Watched:
    """Until it has ended. Raises Unreachable when contact is lost: the probe goes on and ends by itself."""

    def heard(event: dict[str, Any]) -> None:
        if "result" in event:
            on_line(event["result"])
        elif "log" in event and on_log is not None:
            on_log(str(event["log"]))

    request = {
        "state_dir": plan.state_dir,
        "id": plan.run_id,
        "wait_s": work.total_s,
        "log": on_log is not None,
    }
    try:
        answer = call(engine, "probe_follow", request, timeout_s=work.total_s + SLACK_S, on_event=heard)
    except Unreachable as error:
        hint = (
            f"the probe goes on and ends by itself: dflashctl status {work.tag} · dflashctl logs {work.tag}"
        )
        raise Unreachable(error.what, where=error.where, next=hint) from error
    end = End(answer["exit"], answer["problem"], answer["log_tail"])
    return Watched(tuple(answer["results"]), end)
