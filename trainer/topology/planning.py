"""`python -m trainer plan`: measure, predict every layout, show which one is taken and why; topology auto."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer import config as configs
from trainer.compile_policy import hazards
from trainer.errors import ConfigError
from trainer.topology.plan import Layout, Prediction, Rates, choose
from trainer.writing import write_json

PLAN = "plan.json"
PLAN_S = 3600.0  # for loading a large model from a slow disk, and measuring


def as_json(rates: Rates, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """What `plan --json` prints and plan.json of a run holds."""
    chosen = choose(predictions)
    return {
        "schema": "dflash.plan/1",
        "rates": dataclasses.asdict(rates),
        "layouts": [
            {
                "layout": str(each.layout),
                **dataclasses.asdict(each.layout),
                "tokens_s": round(each.tokens_s, 1),
                "bottleneck": each.bottleneck,
                "needs_bytes": round(each.needs_bytes),
                "fits": each.fits,
                "shares": each.shares,
                "against": each.against,
            }
            for each in predictions
        ],
        "chosen": None if chosen is None else str(chosen.layout),
    }


def why(predictions: Sequence[Prediction]) -> str:
    """One sentence: what is taken, and what stood against it."""
    chosen = choose(predictions)
    if chosen is None:
        possible = [each for each in predictions if not each.against]
        if not possible:
            return f"the recipe goes with no layout; {predictions[0].layout}: {predictions[0].against}"
        tightest = min(possible, key=lambda each: each.needs_bytes)
        return (
            f"nothing fits: {tightest.layout} needs the least, {tightest.needs_bytes / 2**30:.1f} GiB of "
            f"{tightest.memory_bytes / 2**30:.1f} GiB"
        )
    others = [each for each in predictions if each.layout.kind != chosen.layout.kind and each.runs]
    text = f"{chosen.layout}: {chosen.tokens_s:,.0f} tokens/s, held back by {chosen.bottleneck}"
    if chosen.shares:
        text += f"; it fits with the optimizer shared out: {chosen.needs_bytes / 2**30:.1f} GiB a GPU"
    if others:
        best = max(others, key=lambda each: each.tokens_s)
        text += f"; {best.layout} would reach {best.tokens_s / chosen.tokens_s:.0%} of that"
    faster = next((each for each in predictions if not each.runs and each.tokens_s > chosen.tokens_s), None)
    if faster is not None:
        size = f"needs {faster.needs_bytes / 2**30:.1f} GiB a GPU"
        text += f"; {faster.layout} would be faster and {size if not faster.fits else 'does not go with it'}"
        text += f" ({faster.against})" if faster.against else ""
    return text


def planned(section: Mapping[str, Any], layout: Layout, shares: bool) -> dict[str, Any]:
    """The `train:` section with this layout in the place of topology auto."""
    places: dict[str, Any] = {**(section.get("layout") or {}), "ranks": None}
    if layout.kind == "colocated":
        places["ranks"] = layout.targets
    else:
        places |= {"targets": layout.targets, "drafters": layout.drafters}
    if shares:
        places["shard_optimizer"] = "on"
    return {**section, "topology": layout.kind, "layout": places}


def against(section: Mapping[str, Any], layout: Layout, torch_version: str, cuda: bool) -> str:
    """Why this section, which topology auto goes with, does not go with a layout; empty where it does."""
    made = planned(section, layout, shares=False)
    problems = configs.check(made)
    if problems or layout.kind != "threads":
        return problems[0] if problems else ""
    policy = configs.load(made).policy
    known = [] if policy.force else hazards(policy, layout.drafters, torch_version, cuda)
    return f"train.policy: known to break with torch {torch_version}: {known[0].name}" if known else ""


def resolve_auto(recipe: Path, run: Path) -> Path:
    """For topology auto: measure in a process of its own, which gives the GPUs back, and write the recipe
    with the layout that was chosen.

    Raises:
        ConfigError: nothing fits, or the measurement failed (its own words are in the log).
    """
    command = [sys.executable, "-m", "trainer", "plan", str(recipe), "--json"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=PLAN_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the layouts were not measured within {PLAN_S:.0f} s",
            where="train.topology",
            next="see what `python -m trainer plan` waits for, or name the topology",
        ) from None
    if done.returncode != 0:
        raise ConfigError("the layouts could not be measured", where="train.topology", next="see above")
    plan = json.loads(done.stdout)
    write_json(run / PLAN, plan)
    taken = next((each for each in plan["layouts"] if each["layout"] == plan["chosen"]), None)
    if taken is None:
        raise ConfigError(
            "no layout fits these GPUs and the recipe",
            where="train.topology",
            next="a smaller token_budget, or fewer anchors; `python -m trainer plan` shows sizes and reasons",
        )
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    layout = Layout(taken["kind"], taken["targets"], taken["drafters"])
    content["train"] = planned(content["train"], layout, taken["shares"])
    path = run / "planned.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def against_plan(run: Path, tokens_s: float) -> str | None:
    """The real rate beside the predicted one, when this run was planned."""
    try:
        planned = json.loads((run / PLAN).read_text())
        taken = next(each for each in planned["layouts"] if each["layout"] == planned["chosen"])
    except (OSError, ValueError, KeyError, StopIteration):
        return None
    share = tokens_s / taken["tokens_s"]
    return (
        f"{taken['layout']}: {tokens_s:,.0f} tokens/s, {share:.1%} of the predicted {taken['tokens_s']:,.0f}"
    )
