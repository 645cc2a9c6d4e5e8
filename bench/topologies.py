"""Every layout of a host's GPUs, run as a person runs it, beside what rates measured on one GPU predict.

    python bench/topologies.py [--gpus 2] [--token-budget 16384] [--layouts colocated,split:1:1,plan]

The target has random weights, so nothing is needed on disk; data are random tokens in rows of one document.
First `python -m trainer plan` measures one GPU. Then each layout is trained by `python -m trainer train` in a
process of its own, measured by its own metrics.jsonl after warm-up, and killed whole. `split` and `threads`
without numbers are those that the plan predicts the most of; `plan` is the plan's choice.
Prints a table and, last, one line of JSON. docs/performance.md tells more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from trainer.machine import prepare_environment  # noqa: E402

prepare_environment()

import yaml  # noqa: E402

from trainer.bench import watched  # noqa: E402
from trainer.bench.place import make_store, make_target_folder, train_section  # noqa: E402
from trainer.bench.shapes import SHAPES  # noqa: E402

USUAL: dict[str, int | None] = {
    "token_budget": 49_152,
    "row_tokens": 4_096,
    "anchors": 512,
    "micro_rows": 2,
    "rows": 512,
}
SMALLER: dict[str, dict[str, int | None]] = {
    "small": {"token_budget": 8_192, "row_tokens": 2_048, "anchors": 256, "micro_rows": 2, "rows": 128},
    "toy": {"token_budget": 128, "row_tokens": 32, "anchors": 6, "micro_rows": None, "rows": 64},
}
LEAST_S = 30.0  # of --limit, for a layout to be begun
POLICIES = {
    "inductor": {"mode": "inductor", "start": "sequential"},  # recipes/threadwarm.yaml's variant nographs
    "eager": {"mode": "eager"},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="27b")
    parser.add_argument("--gpus", type=int, help="all that torch sees if left out")
    parser.add_argument("--layouts", default="colocated,split,threads,plan")
    parser.add_argument("--token-budget", type=int, help="of a batch, all ranks together; default by shape")
    parser.add_argument("--row-tokens", type=int)
    parser.add_argument("--anchors", type=int, help="of a document, which is a row")
    parser.add_argument("--micro-rows", type=int, help="rows of one pass of the drafter")
    parser.add_argument("--anchors-per-pass", type=int, help="of a row, in memory at once")
    parser.add_argument("--execution", choices=["eager", "compiled", "captured"], default="eager")
    parser.add_argument("--policy", choices=list(POLICIES), help="of threads; inductor, on a CPU eager")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured of each layout, after warm-up")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that do not count")
    parser.add_argument("--plan-seconds", type=float, default=15.0, help="each of target and drafter")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds of a layout, start included")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds of all of it, about")
    parser.add_argument("--work-dir", type=Path, help="where the runs lie meanwhile; they are removed")
    parser.add_argument("--keep", action="store_true", help="leave the runs there")
    given = parser.parse_args()
    for name, value in SMALLER.get(given.shape, USUAL).items():
        if getattr(given, name, None) is None:
            setattr(given, name, value)
    if given.gpus is None:
        import torch

        given.gpus = torch.cuda.device_count() or 2
    if given.policy is None:
        given.policy = "eager" if given.device == "cpu" else "inductor"
    return given


def measured_plan(recipe: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What `python -m trainer plan` says; {} when it fails, which is said."""
    words = [sys.executable, "-m", "trainer", "plan", str(recipe), "--json", "--gpus", str(given.gpus)]
    words += ["--seconds", str(given.plan_seconds)]
    try:
        done = subprocess.run(
            words, cwd=REPOSITORY, stdout=subprocess.PIPE, timeout=given.deadline, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"plan DID NOT RUN: {error}", flush=True)
        return {}


def parsed(word: str, gpus: int, planned: dict[str, Any]) -> dict[str, Any] | None:
    """A layout by its word: `colocated`, `split:T:D`, `threads:T:D`, `split`, `threads`, `plan`.

    None: it takes the plan to tell, and there is none.
    """
    kind, *numbers = word.split(":")
    if not all(number.isdecimal() and int(number) for number in numbers):
        sys.exit(f"error: --layouts: {word!r}: numbers of GPUs are whole and at least 1")
    if kind == "colocated" and len(numbers) <= 1:
        ranks = int(numbers[0]) if numbers else gpus
        return {"kind": kind, "targets": ranks, "drafters": ranks}
    if kind in ("split", "threads") and len(numbers) == 2:
        return {"kind": kind, "targets": int(numbers[0]), "drafters": int(numbers[1])}
    if numbers or kind not in ("split", "threads", "plan"):
        sys.exit(f"error: --layouts: {word!r} is not colocated[:N], split[:T:D], threads[:T:D] or plan")
    for each in planned.get("layouts", []):
        if each["kind"] == kind or (kind == "plan" and each["layout"] == planned["chosen"]):
            return {name: each[name] for name in ("kind", "targets", "drafters")}
    return None


def name_of(layout: dict[str, Any]) -> str:
    """As `plan` calls it."""
    if layout["kind"] == "colocated":
        return f"colocated on {layout['targets']}"
    return f"{layout['kind']} {layout['targets']}:{layout['drafters']}"


def recipe_of(layout: dict[str, Any], section: dict[str, Any], policy: str, path: Path) -> Path:
    """Write the recipe of a layout."""
    mine = {**section, "topology": layout["kind"]}
    if layout["kind"] == "colocated":
        mine["layout"] = {"ranks": layout["targets"]}
    else:
        mine["layout"] = {"targets": layout["targets"], "drafters": layout["drafters"]}
    if layout["kind"] == "threads":
        mine |= {"policy": POLICIES[policy], "execution": "eager"}
    path.write_text(yaml.safe_dump({"name": path.stem, "train": mine}, sort_keys=False))
    return path


def measure(
    layout: dict[str, Any],
    recipe: Path,
    place: Path,
    given: argparse.Namespace,
    predicted: float | None,
    left_s: float,
) -> dict[str, Any]:
    """Run one layout: its line of the table.

    Args:
        left_s: it may take no longer.
    """
    name, shared = name_of(layout), layout["kind"] == "colocated"
    used = layout["targets"] if shared else layout["targets"] + layout["drafters"]
    run = place / "runs" / recipe.stem
    env = {"OMP_NUM_THREADS": "1"} if given.device == "cpu" else {}
    print(f"{name}: running", flush=True)
    seen, start_s = watched.watch(
        recipe, run, given.seconds, given.warm_up, used, min(given.deadline, left_s), env
    )
    achieved = watched.rate(seen.steps, given.warm_up, used, given.token_budget)
    found = {
        "layout": name,
        "tok_s": achieved,
        "predicted": predicted,
        "share": achieved / predicted if achieved and predicted else None,
        "start_s": None if start_s != start_s else start_s,
        "peaks": watched.peaks(seen),
        "steps": len(seen.steps),
        "idle_targets": watched.idle(seen, "room"),
        "idle_drafters": watched.idle(seen, "hidden states"),
        "policy": given.policy if layout["kind"] == "threads" else given.execution,
        "died": seen.died,
    }
    print(json.dumps(found), flush=True)  # whoever cuts this program short has what was measured
    if seen.died:
        tail = run.with_suffix(".log").read_text(errors="replace").splitlines()[-40:]
        print("\n".join([f"{name} died; the end of its log:", *tail]), flush=True)
    if not given.keep:
        shutil.rmtree(run, ignore_errors=True)  # a checkpoint may be in it
    return found


def table(found: list[dict[str, Any]]) -> str:
    """For people. Idle: of the targets waiting for room, and of the drafters waiting for hidden states."""
    rows = [["layout", "tok/s", "predicted", "of it", "start s", "peak GiB", "idle T / D", "note"]]
    for each in found:
        waits = [each["idle_targets"], each["idle_drafters"]]
        rows.append(
            [
                each["layout"],
                *(_number(each[name], ",.0f") for name in ("tok_s", "predicted")),
                _number(each["share"], ".1%"),
                _number(each["start_s"], ".0f"),
                _number(max(each["peaks"].values(), default=None), ".1f"),
                " / ".join(_number(wait, ".0%") for wait in waits),
                f"DIED: {each['died']}" if each["died"] else str(each["policy"]),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:], strict=True)),
                row[-1],
            ]
        )
        for row in rows
    )


def _plain(value: Any) -> Any:
    """JSON knows no paths, and no infinity."""
    return None if value == float("inf") else str(value) if isinstance(value, Path) else value


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> None:
    given, began = arguments(), time.monotonic()
    shape = SHAPES[given.shape]
    if given.work_dir is not None:
        given.work_dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="topologies-", dir=given.work_dir))
    try:
        target = make_target_folder(work / "target", shape)
        store = make_store(work / "store", target, shape, given.rows, given.row_tokens)
        section = train_section(
            shape,
            target,
            store,
            given.token_budget,
            given.row_tokens,
            given.anchors,
            device=given.device,
            micro_rows=given.micro_rows,
            execution=given.execution,
        )
        section["objective"]["anchors_per_pass"] = given.anchors_per_pass
        everywhere = {"kind": "colocated", "targets": given.gpus, "drafters": given.gpus}
        planned = measured_plan(recipe_of(everywhere, section, given.policy, work / "plan.yaml"), given)
        predictions = {each["layout"]: each["tokens_s"] for each in planned.get("layouts", [])}
        found: list[dict[str, Any]] = []
        for word in given.layouts.split(","):
            layout = parsed(word.strip(), given.gpus, planned)
            if layout is None:
                print(f"{word}: no plan, so not known", flush=True)
                continue
            name = name_of(layout)
            if any(each["layout"] == name for each in found):
                continue  # the plan's choice was among them
            recipe = recipe_of(layout, section, given.policy, work / f"{name.replace(' ', '-')}.yaml")
            left_s = began + given.limit - time.monotonic()
            if left_s < LEAST_S:
                print(f"{name}: no time left", flush=True)
                continue
            found.append(measure(layout, recipe, work, given, predictions.get(name), left_s))
    finally:
        if given.keep:
            print(f"left in {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    rates = planned.get("rates", {})
    if rates:
        print(
            f"one GPU: target {rates['target_tokens_s']:,.0f} tok/s, drafter "
            f"{rates['drafter_tokens_s']:,.0f} tok/s; the plan takes {planned['chosen']}"
        )
    print(table(found))
    settings = {name: _plain(value) for name, value in vars(given).items()}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    print(json.dumps({"bench": "topologies", **settings, **versions, "plan": planned, "found": found}))
    if not any(each["tok_s"] for each in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
