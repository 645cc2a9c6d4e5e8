"""Whole runs on a tiny random target: through the command line, and in this process where that is enough.

Run: python -m pytest tests/trainer/test_train_run.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from trainer import config as configs
from trainer import recipe_file
from trainer.checkpoint.drafter import load_drafter
from trainer.errors import ConfigError, DataError
from trainer.process.runfiles import RunFiles
from trainer.run.progress import Clock, Tally
from trainer.run.train import run

PROJECT = Path(__file__).parents[2]


def recipe(target: Path, **changes: Any) -> dict[str, Any]:
    section: dict[str, Any] = {
        "target": {"path": str(target)},
        "token_budget": 96,
        "threads": 1,
        "drafter": {
            "layers": 2,
            "block_size": 4,
            "taps": [0, 2, 4],
            "mask_token": "<|mask|>",
            "init": "target",
        },
        "data": {"rows": 12, "row_tokens": 24, "prompt_tokens": 8, "batch": 6},
        "objective": {"anchors_per_document": 4, "gamma": 3.0},
        "optimizer": {"lr": 0.01},
        "budget": {"steps": 20},
        "report_every_s": 0.0,
        "evaluate": {
            "prompts": 3,
            "prompts_before": 2,
            "prompt_tokens": 8,
            "new_tokens": 12,
            "first_tokens": 6,
        },
    }
    for path, value in changes.items():
        at, *keys = path.split("__")
        if keys:
            section.setdefault(at, {})[keys[0]] = value
        else:
            section[at] = value
    return {"version": 1, "name": "tiny", "launch": {"command": ["python"]}, "train": section}


def write_recipe(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "DFLASH_RUN_DIR": str(folder), "PYTHONPATH": str(PROJECT)}


def command_line(arguments: list[str], folder: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=cwd,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=200,
    )


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def in_process(tmp_path: Path, content: dict[str, Any]) -> tuple[Path, list[str], Any]:
    said: list[str] = []
    folder = tmp_path / "run"
    report = run(configs.load(content["train"]), RunFiles(folder), said.append)
    return folder, said, report


def test_twenty_steps_from_the_command_line_and_the_drafter_measured_anew(
    tmp_path: Path, saved_target: Path
) -> None:
    folder = tmp_path / "run"
    path = write_recipe(tmp_path, recipe(saved_target))
    done = command_line(["train", str(path)], folder, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lossless: yes" in done.stdout and "acceptance length" in done.stdout
    summary = read(folder / "summary.json")
    assert summary["headline"].startswith("acceptance length 1.") and " -> " in summary["headline"]
    assert summary["lossless"] is True and summary["best_acceptance_length"] >= 1.0
    names = [row[0] for row in summary["table"]["rows"]]
    assert names[0] == "greedy" and "greedy, first 6 tokens" in names
    assert all(len(row) == len(summary["table"]["columns"]) for row in summary["table"]["rows"])
    rows = [row for row in metrics(folder) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert {row["phase"] for row in rows} == {"training"}
    assert rows[-1]["loss"] < rows[0]["loss"] and len(rows[0]["slot_accuracy"]) == 3
    assert rows[-1]["tokens_per_s"] > 0 and rows[0]["grad_norm"] > 0
    beat = read(folder / "heartbeat.json")
    assert (beat["phase"], beat["step"], beat["total_steps"]) == ("done", 20, 20)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    phases = [event["phase"] for event in events]
    wanted = ["loading", "data", "evaluating", "compiling", "training", "saving", "evaluating", "done"]
    assert [phase for phase in phases if phase != "loading"] == wanted[1:] and phases[0] == "loading"
    parameters = read(folder / "parameters.json")["parameters"]
    assert len(parameters) == 25 and {each["lr"] for each in parameters} == {0.01}
    assert not (folder / "root_cause.json").exists()
    before = [  # each wait is announced
        ("importing torch and transformers", "loading the target from"),
        ("loading the target from", "target Qwen3ForCausalLM, "),
        ("decoding 3 held-out prompts: the target alone", "before training: acceptance length"),
        ("20 steps in", "decoding 3 held-out prompts: what was trained"),
        ("decoding 3 held-out prompts: what was trained", "lossless: yes"),
    ]
    for announced, came in before:
        assert -1 < done.stdout.find(announced) < done.stdout.find(came), (announced, came, done.stdout)
    drafter = folder / "checkpoints" / "step-0000020"
    assert read(drafter / "config.json")["architectures"] == ["DFlashDraftModel"]
    assert len(load_file(drafter / "model.safetensors")) == 25

    again = command_line(
        ["eval", str(drafter), "--target", str(saved_target), "--prompts", "3", "--new-tokens", "12"],
        folder,
        tmp_path,
    )
    assert again.returncode == 0, again.stderr
    assert "lossless: yes" in again.stdout


def test_sigterm_saves_and_ends_with_143(tmp_path: Path, saved_target: Path) -> None:
    folder = tmp_path / "run"
    content = recipe(saved_target, budget__steps=1_000_000, evaluate__prompts=0)
    path = write_recipe(tmp_path, content)
    with subprocess.Popen(
        [sys.executable, "-m", "trainer", "train", str(path)],
        cwd=tmp_path,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert process.stderr is not None and "stopped by SIGTERM" in process.stderr.read()
    (saved,) = (folder / "checkpoints").iterdir()
    step = read(saved / "trainer.json")["step"]
    assert step >= 1 and saved.name == f"step-{step:07d}"
    load_drafter(saved)
    assert not (folder / "root_cause.json").exists()
    # Going on from it is in test_kill_and_resume.py; this is the option of the command line.
    path = write_recipe(tmp_path, recipe(saved_target, budget__steps=30, evaluate__prompts=0))
    refused = command_line(["train", str(path), "--resume", str(folder)], tmp_path / "new", tmp_path)
    assert refused.returncode == 2 and "train.budget.steps: 1000000 there, 30 here" in refused.stderr
    assert (
        "next: resume with the recipe and data that it was made of, or say --allow-changes" in refused.stderr
    )


def test_a_wrong_recipe_is_one_message_and_code_2(tmp_path: Path) -> None:
    """Answered without torch, so quickly."""
    path = write_recipe(tmp_path, {"train": {"target": {"path": "x"}, "drafter": {"blok_size": 3}}})
    done = command_line(["train", str(path)], tmp_path / "run", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "train.drafter.blok_size: unknown key (did you mean block_size?)" in done.stderr
    assert read(tmp_path / "run" / "root_cause.json")["error"].startswith(
        f"ConfigError: {path}:3:5: train.drafter"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", r"recipe\.yaml:2:2: not YAML"),
        ("name: x\n", "the recipe has no train: section"),
        ("- 1\n", "the recipe has no train: section"),
        ("\x00", "not YAML"),
    ],
)
def test_unreadable_recipes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        recipe_file.read(path)


def test_a_recipe_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the recipe: No such file"):
        recipe_file.read(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        recipe_file.read(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target__path": "/nowhere"}, r"no target \(config\.json\) at /nowhere"),
        ({"drafter__mask_token": "<mask>"}, "tokenizer has no token '<mask>'"),
        ({"drafter__taps": [0, 9]}, "tap 9 is out of range: the target has layers 0 to 5"),
        ({"drafter__init_layers": [0, 6]}, "layer 6 is out of range"),
        ({"drafter__intermediate_size": 40}, "the target's layers do not fit the drafter's"),
        ({"device": "cuda"}, "torch sees no CUDA device"),
    ],
)
def test_a_target_and_drafter_that_do_not_fit_are_refused(
    tmp_path: Path, saved_target: Path, changes: dict[str, Any], message: str
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        changes, message = {"target__path": "/nowhere"}, "no target"
    with pytest.raises(ConfigError, match=message):
        in_process(tmp_path, recipe(saved_target, **changes))


def test_packed_text_online_states_micro_batches_and_replays(tmp_path: Path, saved_target: Path) -> None:
    """Rows of several documents, the target read anew at each step: the big runs' way, in small."""
    content = recipe(
        saved_target,
        data={"rows": 12, "row_tokens": 24, "continuations": False, "states": "online"},
        micro_rows=2,
        objective__replays=2,
        objective__labels="kl",
        evaluate__prompts=0,
        budget__steps=6,
    )
    folder, said, report = in_process(tmp_path, content)
    assert report is None and not (folder / "summary.json").exists()
    rows = metrics(folder)
    assert rows[-1]["step"] == 6 and rows[-1]["loss"] < rows[0]["loss"]
    assert any(line.startswith("matrices: adamw, learning rate 0.01") for line in said)


def test_tokens_a_second_are_of_the_rows_that_a_step_reads(
    tmp_path: Path, saved_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows of 24 tokens: the rest of the budget holds no row, and no step reads it."""
    told: list[int] = []
    add = Tally.add

    def spy(self: Tally, sums: Any, tokens: int, *more: Any) -> None:
        told.append(tokens)
        add(self, sums, tokens, *more)

    monkeypatch.setattr(Tally, "add", spy)
    in_process(tmp_path, recipe(saved_target, token_budget=119, evaluate__prompts=0, budget__steps=2))
    assert told == [96, 96]


def test_cut_into_micro_batches_the_run_is_the_same(tmp_path: Path, saved_target: Path) -> None:
    losses = []
    for micro in (4, 1):
        content = recipe(
            saved_target, micro_rows=micro, precision="float32", evaluate__prompts=0, budget__steps=5
        )
        (tmp_path / str(micro)).mkdir()
        folder, _, _ = in_process(tmp_path / str(micro), content)
        losses.append([row["loss"] for row in metrics(folder)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_same_seed_gives_the_same_run(tmp_path: Path, saved_target: Path) -> None:
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        content = recipe(saved_target, seed=seed, evaluate__prompts=0, budget__steps=4)
        folder, _, _ = in_process(tmp_path / name, content)
        losses.append([row["loss"] for row in metrics(folder)])
    assert losses[0] == losses[1] != losses[2]


def broken_target(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("states", ["cached", "online"])
def test_a_target_of_nan_ends_the_run(tmp_path: Path, saved_target: Path, states: str) -> None:
    broken_target(saved_target)
    content = recipe(
        saved_target,
        data={
            "rows": 12,
            "row_tokens": 24,
            "continuations": False,
            "states": states,
            "max_bad_rows": 3,
        },
        evaluate__prompts=0,
    )
    with pytest.raises(DataError, match=r"rows (had|have) non-finite hidden states \(row"):
        in_process(tmp_path, content)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


@pytest.mark.alone
def test_time_budgets_hold(tmp_path: Path, saved_target: Path) -> None:
    content = recipe(saved_target, budget={"train_s": 1.5}, evaluate__prompts=0)
    started = time.monotonic()
    folder, _, _ = in_process(tmp_path, content)
    steps = metrics(folder)
    assert steps[-1]["wall"] - steps[0]["wall"] + 1.0 > 1.4 and time.monotonic() - started < 60
    assert steps[-1]["lr"] < 0.002  # the schedule follows the clock to its end


def test_a_late_run_trains_at_least_a_moment() -> None:
    clock = Clock(steps=None, seconds=0.0, started=time.monotonic())
    assert clock.progress(0) == 1.0
    clock = Clock(steps=10, seconds=1000.0, started=time.monotonic())
    assert clock.progress(5) == pytest.approx(0.5, abs=0.01)


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys; import trainer.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, timeout=60).returncode == 0
