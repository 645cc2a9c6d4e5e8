"""A drafter knows its own target again, and no other one, whatever their folders are called.

Run: python -m pytest tests/trainer/test_target_identity.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_target
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from trainer.errors import ConfigError
from trainer.model import target_identity
from trainer.model.drafter_config import DrafterConfig, from_json
from trainer.model.pair import check_pair, drafter_config
from trainer.model.target_files import read_config
from trainer.model.target_identity import TargetIdentity, identify
from trainer.sections import Drafter as DrafterSection


def trained(folder: Path, seed: int = 0, kind: str = "qwen3") -> Path:
    """A target as training leaves it: no two of them have the same final norm."""
    save_target(folder, kind)
    path = folder / "model.safetensors"
    weights = load_file(path)
    norm = weights["model.norm.weight"]
    norm += 0.1 * torch.randn(norm.shape, generator=torch.Generator().manual_seed(seed))
    save_file({**weights, "model.norm.weight": norm.bfloat16().float()}, path, metadata={"format": "pt"})
    return folder


def made_for(folder: Path) -> DrafterConfig:
    """Through config.json, as it lies on disk."""
    raw = read_config(folder)
    made = drafter_config(DrafterSection(layers=2), raw, 1, identify(folder, raw))
    back = from_json(json.loads(json.dumps(made.to_json())))
    assert back == made
    return back


def refusal(drafter: DrafterConfig, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_pair(drafter, read_config(folder), "runs/a/step-1", str(folder))
    return str(caught.value)


def accept(drafter: DrafterConfig, folder: Path) -> None:
    check_pair(drafter, read_config(folder), "runs/a/step-1", str(folder))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return trained(tmp_path / "Tiny-1M")


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_its_own_target_in_another_folder_and_in_another_number_format(target: Path, tmp_path: Path) -> None:
    drafter = made_for(target)
    accept(drafter, target)
    moved = target.rename(tmp_path / "elsewhere")
    accept(drafter, moved)
    rounded = AutoModelForCausalLM.from_pretrained(moved, dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path / "bfloat16", max_shard_size="40kB")  # in several files, with an index
    assert (tmp_path / "bfloat16" / "model.safetensors.index.json").is_file()
    (tmp_path / "bfloat16" / "tokenizer.json").write_bytes((moved / "tokenizer.json").read_bytes())
    here = identify(tmp_path / "bfloat16", read_config(tmp_path / "bfloat16"))
    assert here.final_norm_sha256 == drafter.target.final_norm_sha256 is not None
    accept(drafter, tmp_path / "bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bfloat16_copy_of_weights_that_were_finer(target: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """A norm that bfloat16 cannot hold: whoever rounds the target for serving still has the same target."""
    path = target / "model.safetensors"
    weights = load_file(path)
    norm = 1 + 0.3 * torch.randn(
        weights["model.norm.weight"].shape, generator=torch.Generator().manual_seed(4)
    )
    save_file({**weights, "model.norm.weight": norm.to(dtype)}, path, metadata={"format": "pt"})
    assert not torch.equal(norm.bfloat16().float(), norm)
    drafter = made_for(target)
    assert drafter.target.final_norm_sha256 is not None
    copy = norm.to(dtype).bfloat16()
    save_file({**weights, "model.norm.weight": copy}, path, metadata={"format": "pt"})
    accept(drafter, target)
    copy[3] += 0.25
    save_file({**weights, "model.norm.weight": copy}, path, metadata={"format": "pt"})
    assert "final_norm_sha256" in refusal(drafter, target)


def test_another_training_of_the_same_model(target: Path, tmp_path: Path) -> None:
    """Same architecture, shape and tokenizer, even the same folder name."""
    other = trained(tmp_path / "other" / "Tiny-1M", seed=1)
    text = refusal(made_for(target), other)
    for part in ("Tiny-1M (Qwen3ForCausalLM)", str(other), "runs/a/step-1", "final_norm_sha256"):
        assert part in text
    assert "model_type" not in text and "tokenizer" not in text


def test_another_architecture_of_equal_sizes(target: Path, tmp_path: Path) -> None:
    other = trained(tmp_path / "other", kind="llama")
    raw, own = read_config(other), read_config(target)
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        assert raw[key] == own[key]
    text = refusal(made_for(target), other)
    assert "model_type qwen3 there, llama here" in text and "(LlamaForCausalLM)" in text


def rename_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|mask|>", "<|hole|>"))


def untie(folder: Path) -> None:
    assert read_config(folder)["tie_word_embeddings"] is True
    change_config(folder, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("change", "part"),
    [(rename_token, "tokenizer_sha256"), (untie, "tie_word_embeddings true there, false here")],
)
def test_a_changed_tokenizer_or_head(target: Path, change: Callable[[Path], None], part: str) -> None:
    drafter = made_for(target)
    change(target)
    assert part in refusal(drafter, target)


def test_tokens_that_were_added_later_do_not_matter(target: Path) -> None:
    drafter = made_for(target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|tool|>"])
    tokenizer.save(str(target / "tokenizer.json"))
    accept(drafter, target)


def test_published_drafters_say_nothing_and_fit_by_their_shape(target: Path) -> None:
    data = made_for(target).to_json()
    assert set(data["dflash_config"]) == {
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "target_identity",
    }
    del data["dflash_config"]["target_identity"]
    published = from_json(data)
    assert (
        published.target == TargetIdentity() and "target_identity" not in published.to_json()["dflash_config"]
    )
    accept(published, target)
    change_config(target, vocab_size=1000)
    assert "vocab_size" in refusal(published, target) and "another target" in refusal(published, target)


@pytest.mark.parametrize(
    "broken", ["nothing", "no weights", "no index", "no json", "another table", "no tokenizer"]
)
def test_what_cannot_be_read_is_not_known(target: Path, broken: str) -> None:
    """Whoever loads it says what is wrong; here it neither fits nor hinders."""
    drafter = made_for(target)
    weights, index = target / "model.safetensors", target / "model.safetensors.index.json"
    if broken == "nothing":
        weights.unlink()
        (target / "tokenizer.json").unlink()
    elif broken == "no weights":
        weights.write_bytes(b"none")
    elif broken == "no tokenizer":
        (target / "tokenizer.json").write_text("{")
    else:
        weights.unlink()  # a whole file would be read, index or not, as transformers does
        index.write_text({"no index": "{}", "no json": "{", "another table": "[1]"}[broken])
    here = identify(target, read_config(target))
    assert here.model_type == "qwen3"
    assert (here.final_norm_sha256 is None) == (broken != "no tokenizer")
    assert (here.tokenizer_sha256 is None) == (broken in ("nothing", "no tokenizer"))
    accept(drafter, target)


@pytest.mark.parametrize("said", [[], "Qwen3-8B", {"tokenizer_sha256": 5}, {"tie_word_embeddings": "yes"}])
def test_an_identity_that_is_none_is_refused(said: object) -> None:
    with pytest.raises(ConfigError, match="not the identity of a target"):
        target_identity.from_json(said, "config.json: dflash_config")


def test_names_are_those_of_the_hub_where_a_folder_tells_it(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "b968826d"
    assert target_identity.name_of(snapshot) == "Qwen/Qwen3-8B"
    assert target_identity.name_of(tmp_path / "Qwen3-8B") == "Qwen3-8B"
