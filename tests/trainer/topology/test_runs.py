"""Whole runs by threads, from recipe to checkpoint, beside the same runs by one thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainer import config as configs
from trainer.checkpoint.files import listed
from trainer.errors import ConfigError
from trainer.process.runfiles import RunFiles
from trainer.run.train import run


def section(target: Path, **changes: Any) -> dict[str, Any]:
    return {
        "target": {"path": str(target)},
        "token_budget": 96,
        "threads": 1,
        "drafter": {"layers": 2, "block_size": 4, "taps": [0, 2, 4], "mask_token": "<|mask|>"},
        "data": {"rows": 8, "row_tokens": 24, "continuations": False, "states": "online"},
        "objective": {"anchors_per_document": 4, "gamma": 3.0, "input_noise": 0.05},
        "optimizer": {"lr": 0.01},
        "budget": {"steps": 6},
        "precision": "float32",
        "micro_rows": 1,
        "report_every_s": 0.0,
        "evaluate": {"prompts": 2, "prompt_tokens": 8, "new_tokens": 8, "first_tokens": 6, "every_steps": 2},
        "logging": {"trackers": []},
        **changes,
    }


def trained(
    folder: Path, content: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], list[str]]:
    """The last checkpoint's weights, the metrics, and what was said."""
    said: list[str] = []
    run(configs.load(content), RunFiles(folder), said.append)
    newest = listed(folder / "checkpoints")[-1]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return load_file(newest / "model.safetensors"), [json.loads(line) for line in lines], said


def test_a_run_by_threads_is_the_run_by_one_thread(saved_target: Path, tmp_path: Path) -> None:
    alone, metrics, _ = trained(tmp_path / "alone", section(saved_target))
    layout = {"targets": 2, "drafters": 3, "wait_s": 120.0}
    threads, by_threads, said = trained(
        tmp_path / "threads", section(saved_target, topology="threads", layout=layout)
    )
    assert any(line.startswith("threads: 2 target, 3 drafter") for line in said)
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert len(losses) == 6
    assert [line["loss"] for line in by_threads if "loss" in line] == pytest.approx(losses, rel=1e-4)
    real = [line["acceptance_length"] for line in metrics if "acceptance_length" in line]
    assert len(real) >= 3
    assert [line["acceptance_length"] for line in by_threads if "acceptance_length" in line] == real
    for name, tensor in alone.items():
        torch.testing.assert_close(threads[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    beat = json.loads((tmp_path / "threads" / "heartbeat.json").read_text())
    assert beat["queues"].keys() == {"hidden states"}
    assert beat["waited_s"].keys() == {"hidden states", "room 0", "room 1"}
    assert all(seconds >= 0 for seconds in beat["waited_s"].values()) and beat["peak_gib"]["cpu"] > 0.05


def test_an_unsound_policy_is_refused_before_anything_is_trained(saved_target: Path, tmp_path: Path) -> None:
    content = section(saved_target, topology="threads", layout={"drafters": 2}, policy={"mode": "inductor"})
    with pytest.raises(ConfigError, match="fx-trace-race"):
        run(configs.load(content), RunFiles(tmp_path / "run"), lambda text: None)
    assert listed(tmp_path / "run" / "checkpoints") == []
