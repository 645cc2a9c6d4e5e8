"""Checkpoints: complete or absent, checked when read.

Run: python -m pytest tests/trainer/test_checkpoint.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer import checkpoint
from trainer.config import Optimizer
from trainer.errors import ConfigError, TrainerError
from trainer.model.drafter import Drafter
from trainer.optim import DrafterOptimizer


def saved(root: Path, drafter: Drafter, step: int = 7, keep: int = 2) -> Path:
    optimizer = DrafterOptimizer(drafter, Optimizer())
    return checkpoint.save(root, step, drafter, optimizer, {"data": {"rows": 3}}, keep)


def test_a_drafter_comes_back_bit_for_bit(tmp_path: Path, make_drafter: Callable[..., Drafter]) -> None:
    drafter = make_drafter(("sliding_attention", "full_attention"))
    folder = saved(tmp_path, drafter)
    assert folder.name == "step-0000007"
    back = checkpoint.load_drafter(folder)
    assert back.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(drafter.state_dict()) and len(weights) == 25
    facts = json.loads((folder / "trainer.json").read_text())
    assert facts["step"] == 7 and facts["data"] == {"rows": 3} and facts["version"] == checkpoint.VERSION
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "state.safetensors",
        "trainer.json",
        "config.json",
        "checksums.json",
    }
    checkpoint.verify(folder)


def test_old_checkpoints_go_and_no_half_written_one_stays(
    tmp_path: Path, make_drafter: Callable[..., Drafter]
) -> None:
    drafter = make_drafter()
    for step in (1, 2, 3, 3):
        saved(tmp_path, drafter, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000002", "step-0000003"]


def test_weights_that_are_not_finite_replace_nothing(
    tmp_path: Path, make_drafter: Callable[..., Drafter]
) -> None:
    drafter = make_drafter()
    good = saved(tmp_path, drafter, 1)
    drafter.norm.weight.data[3] = float("nan")
    with pytest.raises(TrainerError, match=r"weights of norm\.weight are not finite; nothing was saved"):
        saved(tmp_path, drafter, 2)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == [good]


def test_wrong_weights_are_named(tmp_path: Path, make_drafter: Callable[..., Drafter]) -> None:
    folder = saved(tmp_path, make_drafter())
    path = folder / "model.safetensors"
    weights = load_file(path)

    def refused(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, path)
        with pytest.raises(ConfigError, match=message):
            checkpoint.load_drafter(folder)

    refused({k: v for k, v in weights.items() if k != "fc.weight"}, r"weight fc\.weight is missing")
    refused({**weights, "lm_head.weight": torch.zeros(2)}, r"weight lm_head\.weight is not a drafter's")
    refused({**weights, "norm.weight": torch.zeros(2)}, r"weight norm\.weight has shape \(2,\), not \(32,\)")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot read the weights"):
        checkpoint.load_drafter(folder)
    with pytest.raises(ConfigError, match="no drafter there"):
        checkpoint.load_drafter(tmp_path)
