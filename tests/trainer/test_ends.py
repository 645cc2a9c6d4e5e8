"""A target of which only embedding and head are here: the very numbers, and nothing else in memory.

Run: python -m pytest tests/trainer/test_ends.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_target, target_config

from trainer import config as configs
from trainer.errors import ConfigError
from trainer.export.commands import read_as_tables
from trainer.model.ends import bytes_of, ends_bytes, is_whole, keep_ends, load_ends, random_ends
from trainer.model.random_target import random_target
from trainer.model.target import Target, load_target
from trainer.model.tensors import embedding_and_head
from trainer.run.setup import assemble
from trainer.sections import Target as TargetSection
from trainer.sections import TrainConfig
from trainer.topology.start import part_of

CPU = torch.device("cpu")
TAPS = (0, 2)


def tied(target: Target) -> bool:
    return target.head_weight is next(target.embedding.parameters())


def assert_same_ends(ends: Target, whole: Target) -> None:
    assert is_whole(whole) and not is_whole(ends)
    assert torch.equal(ends.head_weight, whole.head_weight)
    tokens = torch.arange(9)[None]
    assert torch.equal(ends.embedding(tokens), whole.embedding(tokens))
    assert tied(ends) == tied(whole)
    assert (ends.device, ends.dtype, ends.hidden_size) == (whole.device, whole.dtype, whole.hidden_size)
    assert (ends.vocabulary, ends.taps, ends.layer_types) == (whole.vocabulary, whole.taps, whole.layer_types)
    assert bytes_of(ends) == ends_bytes(ends) == ends_bytes(whole) < bytes_of(whole)


def test_the_files_ends_are_the_whole_targets(tmp_path: Path, kind: str) -> None:
    folder = save_target(tmp_path / "target", kind)
    ends = load_ends(folder, TAPS, torch.bfloat16, CPU)
    assert ends is not None
    whole = load_target(folder, TAPS, torch.bfloat16, CPU)
    assert_same_ends(ends, whole)
    assert_same_ends(keep_ends(whole, folder), whole)


def test_random_ends_are_the_whole_random_targets(tmp_path: Path, kind: str) -> None:
    target_config(kind).save_pretrained(tmp_path)
    whole = random_target(tmp_path, TAPS, torch.bfloat16, CPU, 3)
    assert_same_ends(random_ends(tmp_path, TAPS, torch.bfloat16, CPU, 3), whole)
    if not tied(whole):
        assert not torch.equal(whole.head_weight, next(whole.embedding.parameters()))


def test_files_that_do_not_fit_are_refused_and_ones_without_ends_take_the_whole_target(
    tmp_path: Path,
) -> None:
    folder = save_target(tmp_path / "target", "llama")
    weights = load_file(folder / "model.safetensors")
    less = {**weights, "lm_head.weight": weights["lm_head.weight"][:, :16].clone()}
    save_file(less, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"weight lm_head.weight is \(\d+, 16\), by config.json"):
        load_ends(folder, TAPS, torch.float32, CPU)
    headless = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    save_file(headless, folder / "model.safetensors", {"format": "pt"})
    assert load_ends(folder, TAPS, torch.float32, CPU) is None
    with pytest.raises(ConfigError, match=r"1 weights are missing, lm_head\.weight first"):
        load_target(folder, TAPS, torch.float32, CPU)
    other = {name.replace("embed_tokens", "words"): tensor for name, tensor in weights.items()}
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    assert load_ends(folder, TAPS, torch.float32, CPU) is None


def test_only_who_can_do_without_the_ends_is_told_to(tmp_path: Path) -> None:
    """`import` was told to export with --no-head."""
    folder = save_target(tmp_path / "target", "qwen3")
    weights = load_file(folder / "model.safetensors")
    weights["other.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    for read, hint in (
        (embedding_and_head, "do without"),
        (read_as_tables, "do without"),
        (read_as_tables, ""),
    ):
        with pytest.raises(ConfigError, match="no single embedding and head") as caught:
            read(folder, hint)
        assert caught.value.next == hint


def test_a_tied_embedding_of_another_shape_is_refused_too(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target", "qwen3")  # tied
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    save_file({**weights, name: weights[name][:5].clone()}, folder / "model.safetensors", {"format": "pt"})
    for load in (load_ends, load_target):
        with pytest.raises(ConfigError, match=r"embed_tokens.weight is \(5, 32\), by config.json"):
            load(folder, TAPS, torch.float32, CPU)


def config(target: Path, **changes: object) -> TrainConfig:
    return configs.load(
        {
            "target": {"path": str(target)},
            "topology": "split",
            "layout": {"targets": 2, "drafters": 2},
            "token_budget": 96,
            "drafter": {"layers": 2, "block_size": 4, "taps": [0, 2], "mask_token": "<|mask|>"},
            "data": {"row_tokens": 24, "continuations": False, "states": "online"},
            "objective": {"gamma": 3.0},
            "evaluate": {"prompts": 0},
            **changes,
        }
    )


def test_who_loads_what(tmp_path: Path) -> None:
    assert [part_of(rank, config(tmp_path)) for rank in range(4)] == ["ends", "ends", "target", "target"]
    measures = config(tmp_path, evaluate={"prompts": 2})
    assert [part_of(rank, measures) for rank in range(3)] == ["all", "ends", "target"]
    reads = config(tmp_path, data={"row_tokens": 24, "continuations": False, "states": "cached"})
    assert [part_of(rank, reads) for rank in range(2)] == ["all", "ends"]
    assert part_of(None, measures) == "all"
    alone = config(tmp_path, topology="colocated", layout={"ranks": 2})
    assert [part_of(rank, alone) for rank in range(2)] == ["all", "all"]


@pytest.mark.parametrize("init", ["random", "target"])
@pytest.mark.parametrize("weights", ["file", "random"])
def test_the_drafter_begins_alike_whatever_was_loaded(
    saved_target: Path, init: str, weights: Literal["file", "random"]
) -> None:
    drafter = {"layers": 2, "block_size": 4, "taps": [0, 2], "mask_token": "<|mask|>", "init": init}
    given = config(saved_target, drafter=drafter)
    made = dataclasses.replace(given, target=TargetSection(str(saved_target), weights=weights))
    said: list[str] = []
    whole, ends, target = (assemble(made, said.append, part) for part in ("all", "ends", "target"))
    assert_same_ends(ends.target, whole.target)
    assert is_whole(target.target)
    told = [line for line in said if line.startswith("only the target's embedding and head are loaded here")]
    assert len(told) == 1
    for name, weight in whole.drafter.state_dict().items():
        assert torch.equal(weight, ends.drafter.state_dict()[name]), name
        assert torch.equal(weight, target.drafter.state_dict()[name]), name
