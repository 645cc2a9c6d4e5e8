"""Whole runs of the command line on tiny models, with a fault in them, and what each must come to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from forked_runs import Run
from small_disk import on_small_disk

from trainer.checkpoint.files import listed
from trainer.machine import process_start

PROJECT = Path(__file__).parents[3]
FAULTS = Path(__file__).parent / "faults"
LIMIT_S = 240  # for a whole run on a busy machine
CAUSES = {
    "raise": "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "thread": "RuntimeError: CUDA out of memory",
    "kill": "ended by SIGKILL",
    "exit-0": "left with exit status 0 before the run was complete",
    "exit-3": "left with exit status 3 and no word of why",
    "hang": "no heartbeat for",
    "stuck": "no heartbeat for",
    "nan": "not finite",
    "disk": "could not be written: No space left on device",
}
EXIT_S = 10.0  # from a fault to the run's exit; for a hang, after its deadline
WAIT_S = 4.0  # how long a thread of a run with a fault waits for another
TRAINING_S = 4.0  # the least that the phase training allows in a run with a fault: faults/sitecustomize.py
SMALL_DISK = "24m"


@dataclass(frozen=True)
class Layout:
    topology: str
    targets: int
    drafters: int  # of colocated: ranks

    @property
    def alone(self) -> bool:
        return self.topology == "threads" or (self.topology == "colocated" and self.drafters == 1)

    @property
    def recipe(self) -> dict[str, Any]:
        if self.topology == "colocated":
            return {"layout": {"ranks": self.drafters}}
        return {
            "topology": self.topology,
            "layout": {"targets": self.targets, "drafters": self.drafters},
        }


def colocated(ranks: int) -> Layout:
    return Layout("colocated", 0, ranks)


def section(target: Path, layout: Layout, steps: int) -> dict[str, Any]:
    return {
        "target": {"path": str(target)},
        "device": "cpu",
        "token_budget": 96,
        "drafter": {"layers": 2, "block_size": 4, "taps": [0, 2, 4], "mask_token": "<|mask|>"},
        "data": {"rows": 8, "row_tokens": 24, "continuations": False, "states": "online"},
        "objective": {"anchors_per_document": 4, "gamma": 3.0, "input_noise": 0.05},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup_steps": 2, "kind": "constant_linear", "constant_share": 1.0},
        "budget": {"steps": steps},
        "precision": "float32",
        "report_every_s": 0.0,
        "evaluate": {"prompts": 0},
        "logging": {"trackers": []},
        **layout.recipe,
    }


def start(
    folder: Path, content: dict[str, Any], *options: str, fault: str | None = None, forked: bool = False
) -> subprocess.Popen[str] | Run:
    """Args:
    fault: of "disk", the run's folder is on a small one: what was there at its end is in FOLDER.after.
    forked: not started as a person does, in a third of the time. For what comes after the start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder.parent / f"{folder.name}-{len(list(folder.parent.glob('*.yaml')))}.yaml"
    recipe.write_text(yaml.safe_dump({"version": 1, "name": "tiny", "train": content}))
    env = {**os.environ, "DFLASH_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    if fault is not None:
        env |= {
            "DFLASH_TEST_FAULT": fault,
            "DFLASH_TEST_FAULT_AT": str(folder.parent / "fault-at"),
            "PYTHONPATH": f"{FAULTS}:{PROJECT}",
        }
        if content.get("topology") == "split":
            env["DFLASH_TEST_DRAFTERS"] = str(content["layout"]["drafters"])
    words = ["train", str(recipe), *options]
    if forked:
        return Run(words, env, folder.with_name(f"{recipe.stem}.log"))
    command = [sys.executable, "-m", "trainer", *words]
    return subprocess.Popen(
        on_small_disk(folder, SMALL_DISK, command) if "disk:" in (fault or "") else command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [read["loss"] for read in map(json.loads, lines) if "loss" in read]


def alive(folder: Path) -> list[int]:
    """Pids of the run's processes that still run, but for its launcher."""
    beats = [json.loads(path.read_text()) for path in folder.rglob("heartbeat.json")]
    return sorted({beat["pid"] for beat in beats if process_start(beat["pid"]) == beat["start"]})


def step_of(folder: Path) -> int | None:
    """That the run's heartbeat tells."""
    with suppress(OSError, ValueError):
        return json.loads((folder / "heartbeat.json").read_text())["step"]
    return None


def wait_for_step(folder: Path, process: subprocess.Popen[str] | Run) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if (folder / "metrics.jsonl").exists() and losses(folder):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no step")


def failed_run(
    target: Path, folder: Path, fault: str, layout: Layout, forked: bool = False
) -> dict[str, float | str]:
    """A run with that fault ends soon, with its cause, a status, and no process left. What to record.

    Args:
        fault: "kind:rank or thread:step", then others, which are not the cause.
        forked: see `start`.
    """
    kind, who, step = fault.partition(",")[0].split(":")
    content = section(target, layout, int(step) + 2 if kind == "disk" else 500)
    if "slow:" in fault:
        content["checkpoint"] = {"every_steps": 2}
    process = start(folder, content, fault=fault, forked=forked)
    text, _ = process.communicate(timeout=LIMIT_S)
    took = time.monotonic() - float((folder.parent / "fault-at").read_text())
    if kind == "disk":
        folder = folder.with_name(f"{folder.name}.after")
        assert (folder / "filler").stat().st_size > 1 << 20
        text = (folder / "log").read_text()
    assert process.returncode == expected_status(kind, layout), (process.returncode, text)
    cause = json.loads((folder / "root_cause.json").read_text())
    for words in expected_words(kind, who, layout):
        assert words in cause["error"], (cause, text)
        assert words in text or kind == "disk"  # that log is on the full disk
    if not layout.alone:
        assert cause["rank"] == (0 if kind == "disk" else int(who)), (cause, text)  # the first one saves
    in_thread = kind == "thread" or not who.isdigit()
    assert in_thread or kind in ("disk", "nan") or cause["step"] == int(step), cause
    if kind == "raise":
        # One message, of whose memory and what to lower; where it was asked for is in the root cause.
        assert cause["error"].startswith(f"OutOfMemory: {_short(who, layout)}training, step "), cause
        assert "lower train." in cause["error"] and "known failure cuda-oom" not in text, (cause, text)
        assert "Traceback" not in text and "sitecustomize.py" in cause["where"], (cause, text)
        assert [known["name"] for known in cause["known"]] == ["cuda-oom"]
        assert who.isdigit() or f"in thread {who}" in cause["traceback"]
    if "no heartbeat" in cause["error"]:
        assert "Current thread" in cause["traceback"], "where it hung"
    assert alive(folder) == []
    # Saving for a failed peer would write what nobody asked for.
    assert listed(folder / "checkpoints") == []
    allowed = EXIT_S
    if "no heartbeat" in cause["error"]:
        # What the launcher went by: heartbeat.json is written once a second, and a fast run's is older.
        told = re.search(r"no heartbeat for (\d+) s \(training allows (\d+) s\)", cause["error"])
        assert told is not None, cause["error"]
        quiet, deadline = map(int, told.groups())
        assert deadline >= TRAINING_S and deadline <= quiet <= deadline + EXIT_S, cause["error"]
        allowed += deadline
    elif kind == "hang":
        allowed += WAIT_S
    assert took <= allowed, (took, text)
    return {"fault": fault, "layout": str(layout), "seconds": round(took, 2)}


def _short(who: str, layout: Layout) -> str:
    """Who it is that memory is short for."""
    if not who.isdigit():
        return f"thread {who}, "
    if layout.alone:
        return ""
    role = ""
    if layout.topology == "split":
        role = " (drafter)" if int(who) < layout.drafters else " (target)"
    return f"rank {who}{role}, "


def expected_status(kind: str, layout: Layout) -> int:
    """Who waits for the run's one process learns how that ended; ranks' launcher ends by itself."""
    if kind == "thread":
        return 70
    if kind == "kill":
        return -9 if layout.alone else 1
    return 3 if kind == "exit-3" else 1


def expected_words(kind: str, who: str, layout: Layout) -> list[str]:
    """Of the root cause."""
    if who.isdigit():
        if kind != "nan" or layout.alone:
            return [CAUSES[kind]]
        if layout.topology == "split" and int(who) >= layout.drafters:
            return ["rows have non-finite hidden states", f"made by rank {who} ("]
        return ["before they were added up", f"by number of steps: rank {who} ("]
    if kind == "hang":
        return [f"of {who}: nothing for {WAIT_S:.0f} s"]
    if kind == "nan" and who.startswith("target"):
        return ["rows have non-finite hidden states", f"made by {who} ("]
    if kind == "nan":
        return ["before they were added up", f"by number of steps: {who} ("]
    return [CAUSES[kind]]
