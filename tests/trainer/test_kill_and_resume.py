"""Killed at any moment and resumed, a run is the run that nobody killed: the same losses, the same weights.

Run: python -m pytest tests/trainer/test_kill_and_resume.py
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_runs import finish, kill, losses, small_library, start, step_of, wait_for
from tiny_models import save_target

from trainer.checkpoint import files as checkpoint
from trainer.process.runfiles import RunFiles

STEPS = 24
LAST = f"step-{STEPS:07d}"


def section(target: Path, **changes: Any) -> dict[str, Any]:
    """Every step reported, a checkpoint after every second; noise on the inputs makes generators count."""
    made: dict[str, Any] = {
        "target": {"path": str(target)},
        "token_budget": 96,
        "micro_rows": 2,
        "threads": 1,
        "precision": "float32",
        "drafter": {"layers": 2, "block_size": 4, "taps": [0, 2, 4], "mask_token": "<|mask|>"},
        "data": {"rows": 10, "row_tokens": 24, "prompt_tokens": 8, "batch": 10},
        "objective": {"anchors_per_document": 4, "gamma": 3.0, "input_noise": 0.05, "replays": 2},
        "optimizer": {
            "lr": 0.01,
            "groups": [
                {"name": "matrices", "match": ["*_proj.weight", "fc.weight"], "algorithm": "muon"},
                {"name": "norms", "match": ["*norm.weight"]},
            ],
        },
        "budget": {"steps": STEPS},
        "report_every_s": 0.0,
        "evaluate": {"prompts": 0},
        "checkpoint": {"every_steps": 2, "keep": 3},
        "logging": {"trackers": []},
    }
    return {**made, **changes}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    small_library(folder / "library")
    return save_target(folder / "target")


@pytest.fixture(scope="module")
def unharmed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody kills."""
    folder = tmp_path_factory.mktemp("unharmed") / "run"
    code, text = finish(start(section(target), folder), folder)
    assert code == 0, text
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))
    assert len(set(losses(folder).values())) == STEPS
    return folder


def digest(folder: Path, name: str = "model.safetensors") -> str:
    return hashlib.sha256((folder / "checkpoints" / LAST / name).read_bytes()).hexdigest()


def assert_same_run(folder: Path, unharmed: Path) -> None:
    assert losses(folder) == losses(unharmed)
    assert digest(folder) == digest(unharmed)
    assert digest(folder, "state.safetensors") == digest(unharmed, "state.safetensors")
    # A checkpoint that is due while another is being written is taken a step later: their steps may differ.
    kept = checkpoint.listed(folder / "checkpoints")
    assert len(kept) == 3 and kept[0].name == LAST
    for each in kept:
        checkpoint.verify(each)
    left = {path.name for path in (folder / "checkpoints").iterdir()} - {each.name for each in kept}
    assert {name for name in left if not name.startswith("damaged-step-")} == {"best"}


def being_written(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".step-*.tmp"))


def kill_again_and_again(target: Path, folder: Path, kills: int, seed: int) -> int:
    """Kill, resume, kill, ...: at random moments of training and of writing. How often it was alive then."""
    chance = random.Random(seed)
    hit = 0
    for number in range(kills):
        process = start(section(target), folder, resume_from(folder))
        if number % 2:  # just when a checkpoint is being written, or a little later
            moment = chance.randrange(1, 4)
            begun = len(checkpoint.listed(folder / "checkpoints"))
            alive = wait_for(
                process,
                lambda b=begun, m=moment: (
                    being_written(folder) and step_of(folder) >= min(STEPS - 4, 2 * m + b)
                ),
            )
        else:
            before = step_of(folder)
            wanted = min(STEPS - 2, before + chance.randrange(1, 6))
            alive = wait_for(process, lambda w=wanted: step_of(folder) >= w)
            time.sleep(chance.random() * 0.01)
        hit += alive and process.exitcode is None
        kill(process)
    return hit


def resume_from(folder: Path) -> Path | None:
    return folder if checkpoint.listed(folder / "checkpoints") else None


def carry_on(target: Path, folder: Path) -> str:
    code, text = finish(start(section(target), folder, resume_from(folder)), folder)
    assert code == 0, text
    return text


def test_killed_three_times_and_resumed_it_is_the_same_run(
    target: Path, unharmed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert kill_again_and_again(target, folder, kills=3, seed=11) >= 2
    text = carry_on(target, folder)
    assert "going on from" in text
    assert_same_run(folder, unharmed)


def test_sigterm_saves_and_the_run_goes_on_from_there(target: Path, unharmed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    never = {"every_steps": None, "every_s": None}
    process = start(section(target, checkpoint=never), folder)
    assert wait_for(process, lambda: step_of(folder) >= 3)
    process.terminate()
    code, text = finish(process, folder)
    assert code == 143 and "stopped by SIGTERM" in text
    (saved,) = checkpoint.listed(folder / "checkpoints")
    assert checkpoint.read_facts(saved)["schedule"]["step"] == step_of(folder) < STEPS
    carry_on(target, folder)
    assert losses(folder) == losses(unharmed) and digest(folder) == digest(unharmed)
    assert not (folder / "root_cause.json").exists()


def test_nothing_is_saved_because_another_process_failed(target: Path, tmp_path: Path) -> None:
    """A launcher ends the others with SIGTERM when one has failed; that is no wish to save."""
    folder = tmp_path / "run"
    made = section(target, checkpoint={"every_steps": None, "every_s": None}, budget={"steps": 1_000_000})
    process = start(made, folder)
    assert wait_for(process, lambda: step_of(folder) >= 2)
    RunFiles(folder).fail(RuntimeError("rank 1: out of memory"))
    process.terminate()
    code, text = finish(process, folder)
    assert code == 143
    assert "nothing is saved: another process of this run has failed (RuntimeError: rank 1" in text
    assert checkpoint.listed(folder / "checkpoints") == []
    assert not list((folder / "checkpoints").iterdir())


def test_a_disk_that_is_full_from_the_start_ends_with_one_message(target: Path, tmp_path: Path) -> None:
    """Files may grow to 20 kB; the weights alone are larger. Metrics and training are not harmed."""
    folder = tmp_path / "run"
    code, text = finish(start(section(target), folder, file_bytes=20_000), folder)
    assert code == 1 and "Traceback" not in text
    assert "WARNING: the checkpoint of step 2 could not be written: File too large" in text
    assert f"error: {folder / 'checkpoints'}: the checkpoint of step {STEPS} could not be written" in text
    assert "next: make room there" in text
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))
    assert list((folder / "checkpoints").iterdir()) == []
    assert RunFiles(folder).failed_peer() is None


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_twenty_times_three_random_moments(
    target: Path, unharmed: Path, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    folder = tmp_path / "run"
    alive = kill_again_and_again(target, folder, kills=3, seed=seed)
    record_property("killed while it ran", alive)
    assert alive >= 2  # a kill may come just after the end
    carry_on(target, folder)
    assert_same_run(folder, unharmed)
