"""A target of random weights for measuring: the file's model in all but its numbers, and called what it is.

Run: python -m pytest tests/trainer/test_random_target.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import target_config

from trainer import config as configs
from trainer.checkpoint.files import listed
from trainer.errors import ConfigError
from trainer.evaluation.evaluate_checkpoint import evaluate_checkpoint
from trainer.export.commands import export
from trainer.model.random_target import WORTHLESS, random_target
from trainer.model.target import load_target
from trainer.process.runfiles import RunFiles
from trainer.run.train import run
from trainer.sections import Evaluate

CPU = torch.device("cpu")


def without_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def test_it_is_the_files_model_in_all_but_its_numbers(saved_target: Path) -> None:
    real = load_target(saved_target, (0, 2), torch.float32, CPU)
    made = random_target(without_weights(saved_target), (0, 2), torch.float32, CPU, seed=3)
    shapes = {name: (each.shape, each.dtype) for name, each in real.model.named_parameters()}
    assert {name: (each.shape, each.dtype) for name, each in made.model.named_parameters()} == shapes
    assert not any(each.requires_grad for each in made.model.parameters())
    assert (made.head_weight is made.embedding.weight) == (real.head_weight is real.embedding.weight)
    tokens = torch.arange(6)[None]
    states = made.run(tokens, tokens, full=True)
    assert states.final is not None and states.final.isfinite().all()
    assert not torch.equal(states.taps, real.run(tokens, tokens).taps)


def test_equal_seeds_give_equal_targets_and_generators_stay(tmp_path: Path, kind: str) -> None:
    target_config(kind).save_pretrained(tmp_path)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (random_target(tmp_path, (0,), torch.bfloat16, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, same.model.state_dict()[name]), name
    assert not torch.equal(one.head_weight, other.head_weight)
    assert one.dtype == torch.bfloat16
    for name, buffer in one.model.named_buffers():  # rounded frequencies would be another model
        assert buffer.dtype != torch.bfloat16, name


def test_a_config_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ConfigError, match="transformers cannot make the target"):
        random_target(tmp_path, (0,), torch.float32, CPU, 0)


def section(target: Path, **changes: Any) -> dict[str, Any]:
    return {
        "target": {"path": str(target), "weights": "random"},
        "token_budget": 96,
        "threads": 1,
        "drafter": {"layers": 1, "block_size": 4, "taps": [0, 2], "mask_token": "<|mask|>"},
        "data": {"rows": 8, "row_tokens": 24, "continuations": False, "states": "online"},
        "objective": {"anchors_per_document": 4, "gamma": 3.0},
        "budget": {"steps": 2},
        "evaluate": {"prompts": 2, "prompt_tokens": 8, "new_tokens": 8, "first_tokens": 6},
        "logging": {"trackers": []},
        **changes,
    }


def test_a_run_on_it_says_so_everywhere_and_its_drafter_goes_nowhere(
    saved_target: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    weights = (saved_target / "model.safetensors").read_bytes()
    content = section(without_weights(saved_target))
    report = run(configs.load(content), RunFiles(tmp_path / "run"), said.append)
    assert WORTHLESS in said
    assert report is not None and report.headline.startswith("RANDOM TARGET, worth nothing: acceptance")
    assert report.notes[0] == WORTHLESS
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["headline"] == report.headline
    assert WORTHLESS in (tmp_path / "run" / "events.jsonl").read_text()
    made = listed(tmp_path / "run" / "checkpoints")[-1]
    assert json.loads((made / "trainer.json").read_text())["target"]["weights"] == "random"
    with pytest.raises(ConfigError, match="trained on RANDOM WEIGHTS in the shape of target"):
        export(made, tmp_path / "out", "hf", None)
    assert not (tmp_path / "out").exists()
    # The true weights are there now: still not the ones that it was trained for.
    (saved_target / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match="weights random there, of files here"):
        evaluate_checkpoint(made, str(saved_target), Evaluate(), 0)
    begin = {"init": "drafter", "init_from": str(made), "layers": 1, "block_size": 4, "mask_token_id": 1}
    after = {**section(saved_target, drafter=begin), "target": {"path": str(saved_target)}}
    with pytest.raises(ConfigError, match="weights random there, of files here"):
        run(configs.load(after), RunFiles(tmp_path / "again"), said.append)


def test_other_weights_than_these_two_are_refused() -> None:
    found = configs.check({**section(Path("t")), "target": {"path": "t", "weights": "rnadom"}})
    assert len(found) == 1 and found[0].startswith(
        "train.target.weights: 'rnadom' is not one of file, random"
    )
