"""Runs of several processes on one machine: as exact as one, and ended with the first cause by any fault.

The campaign of faults: python -m pytest -m soak tests/trainer/topology/test_ranks.py --junitxml=FILE
writes, for each, the seconds from the fault to the run's exit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_disk import on_small_disk

from trainer import config as configs
from trainer.checkpoint.files import listed
from trainer.machine import process_start
from trainer.run.runfiles import RunFiles
from trainer.run.train import run

PROJECT = Path(__file__).parents[3]
FAULTS = Path(__file__).parent / "faults"
LIMIT_S = 240  # for a whole run on a busy machine
CAUSES = {
    "raise": "RuntimeError: CUDA out of memory",
    "thread": "RuntimeError: CUDA out of memory",
    "kill": "ended by SIGKILL",
    "exit-0": "left with exit status 0 before the run was complete",
    "exit-3": "left with exit status 3 and no word of why",
    "hang": "no heartbeat for",
    "nan": "not finite",
    "disk": "could not be written: No space left on device",
}
EXIT_S = 10.0  # from a fault to the run's exit; for a hang, after its deadline
SMALL_DISK = "24m"


def section(target: Path, ranks: int, steps: int) -> dict[str, Any]:
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
        "layout": {"ranks": ranks},
    }


def start(
    folder: Path, content: dict[str, Any], *options: str, fault: str | None = None
) -> subprocess.Popen[str]:
    """fault: of "disk", the run's folder is on a small one: what was there at its end is in FOLDER.after."""
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
    command = [sys.executable, "-m", "trainer", "train", str(recipe), *options]
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


def ranks_alive(folder: Path) -> list[int]:
    """Pids of ranks that still run."""
    beats = [json.loads(path.read_text()) for path in folder.glob("ranks/*/heartbeat.json")]
    return [beat["pid"] for beat in beats if process_start(beat["pid"]) == beat["start"]]


def test_two_ranks_then_three_train_as_one_process_does(saved_target: Path, tmp_path: Path) -> None:
    run(configs.load(section(saved_target, 1, 8)), RunFiles(tmp_path / "alone"), lambda text: None)
    wanted = losses(tmp_path / "alone")
    assert len(wanted) == 8
    folder = tmp_path / "ranks"
    for ranks, steps, options in ((2, 5, ()), (3, 8, ("--resume", str(folder), "--allow-changes"))):
        process = start(folder, section(saved_target, ranks, steps), *options)
        text, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, text
        assert ranks_alive(folder) == []
    assert losses(folder) == pytest.approx(wanted, rel=1e-5)
    # One of the ranks saves, reports and tells.
    assert [path.name for path in listed(folder / "checkpoints")] == ["step-0000008", "step-0000005"]
    beat = json.loads((folder / "heartbeat.json").read_text())
    assert beat["phase"] == "done" and beat["step"] == 8 and "rank 2 MainThread" in beat["threads"]
    assert not (folder / "root_cause.json").exists()


def failed_run(
    target: Path, folder: Path, fault: str, ranks: int = 2, split: bool = False
) -> dict[str, float | str]:
    """A run with that fault ends soon, with its cause, a status, and no process left. What to record.

    Args:
        fault: "kind:rank:step", then others, which are not the cause.
    """
    kind, rank, step = fault.partition(",")[0].split(":")
    content = section(target, ranks, int(step) + 2 if kind == "disk" else 500)
    if "slow:" in fault:
        content["checkpoint"] = {"every_steps": 2}
    if split:
        content |= {"topology": "split", "layout": {"targets": ranks, "drafters": ranks}}
    process = start(folder, content, fault=fault)
    text, _ = process.communicate(timeout=LIMIT_S)
    took = time.monotonic() - float((folder.parent / "fault-at").read_text())
    if kind == "disk":
        folder = folder.with_name(f"{folder.name}.after")
        assert (folder / "filler").stat().st_size > 1 << 20
        text = (folder / "log").read_text()
    assert process.returncode not in (0, None), text
    cause = json.loads((folder / "root_cause.json").read_text())
    where = {cause["rank"]}
    if kind == "disk":
        where = {0}  # who saves, whoever filled the disk
    elif kind == "nan":  # gradients are sums over the drafters
        where = set(range(ranks))
    else:
        assert cause["step"] in (None, int(step)) or kind == "thread"
        where = {int(rank)}
    words = CAUSES[kind]
    if kind == "nan" and split and int(rank) >= ranks:
        words = "rows have non-finite hidden states"
    assert words in cause["error"] and cause["rank"] in where, (cause, text)
    assert words in text or kind == "disk"  # that log is on the full disk
    if kind == "raise":
        assert [known["name"] for known in cause["known"]] == ["cuda-oom"]
    assert ranks_alive(folder) == []
    # Saving for a failed peer would write what nobody asked for.
    assert listed(folder / "checkpoints") == []
    beat = json.loads((folder / "ranks" / rank / "heartbeat.json").read_text())
    allowed = EXIT_S + (beat["deadline_s"] if kind == "hang" else 0.0)
    assert took <= allowed, (took, text)
    return {"fault": fault, "layout": "split" if split else "colocated", "seconds": round(took, 2)}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("raise:1:2", marks=pytest.mark.soak),  # below, a raise while a disk is slow
        "kill:0:1",
        "disk:1:2",
        # Nobody else notices: the first rank is in one long call, where it hears no signal either.
        "exit-0:1:2,stuck:0:2",
        # While a checkpoint is on its way to a slow disk.
        "raise:0:3,slow:0:1",
    ],
)
def test_a_fault_ends_the_run_with_its_cause(fault: str, saved_target: Path, tmp_path: Path) -> None:
    failed_run(saved_target, tmp_path / "run", fault)


Record = Callable[[str, object], None]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(50))
def test_any_of_fifty_random_faults_is_told_rightly(
    number: int, saved_target: Path, tmp_path: Path, record_property: Record
) -> None:
    generator = random.Random(number)
    kind = sorted(CAUSES)[number % len(CAUSES)]
    split, ranks = generator.choice([(False, 2), (False, 3), (False, 4), (True, 2)])
    rank = generator.randrange(2 * ranks if split else ranks)
    fault = f"{kind}:{rank}:{generator.randrange(1, 8)}"
    for key, value in failed_run(saved_target, tmp_path / "run", fault, ranks, split).items():
        record_property(key, value)


def wait_for_step(folder: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if (folder / "metrics.jsonl").exists() and losses(folder):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no step")


@pytest.mark.parametrize("number, to_all", [(signal.SIGTERM, True), (signal.SIGKILL, False)])
def test_a_signal_to_the_launcher(
    number: signal.Signals, to_all: bool, saved_target: Path, tmp_path: Path
) -> None:
    """SIGTERM: the first rank saves, and all leave; also if every process was told, as by whoever stops a
    whole service, and the launcher last. SIGKILL: no rank outlives the launcher.
    """
    folder = tmp_path / "run"
    process = start(folder, section(saved_target, 2, 100_000))
    wait_for_step(folder, process)
    assert len(ranks_alive(folder)) == 2
    for pid in ranks_alive(folder) if to_all else []:
        os.kill(pid, number)
    process.send_signal(number)
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == (143 if number == signal.SIGTERM else -9), text
    end = time.monotonic() + 30
    while ranks_alive(folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert ranks_alive(folder) == []
    saved = listed(folder / "checkpoints")
    assert len(saved) == (1 if number == signal.SIGTERM else 0), text
    assert not (folder / "root_cause.json").exists()


def test_split_trains_as_one_process_does(saved_target: Path, tmp_path: Path) -> None:
    run(configs.load(section(saved_target, 1, 5)), RunFiles(tmp_path / "alone"), lambda text: None)
    folder = tmp_path / "split"
    layout = {"targets": 2, "drafters": 2}
    process = start(folder, section(saved_target, 1, 5) | {"topology": "split", "layout": layout})
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, text
    assert "split: 2 target, 2 drafter" in text
    assert "only the target's embedding and head are loaded here" in text
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert ranks_alive(folder) == []


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", sorted(CAUSES))
def test_a_fault_in_either_role_ends_split(
    kind: str, rank: int, saved_target: Path, tmp_path: Path, record_property: Record
) -> None:
    for key, value in failed_run(saved_target, tmp_path / "run", f"{kind}:{rank}:2", split=True).items():
        record_property(key, value)
