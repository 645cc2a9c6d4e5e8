"""Pairs, recipes and folders that cannot work: one ConfigError each, with place and numbers, before weights
are read.

Run: python -m pytest tests/trainer/oracles/test_refusals.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_cases import DIMENSIONS
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

from trainer import config as configs
from trainer.errors import ConfigError, TrainerError
from trainer.evaluation.evaluate_checkpoint import evaluate_checkpoint
from trainer.model.drafter_config import DrafterConfig
from trainer.model.pair import drafter_config
from trainer.model.target import Target, load_target
from trainer.model.target_files import read_config
from trainer.model.target_identity import identify
from trainer.run.setup import assemble
from trainer.sections import Drafter as DrafterSection
from trainer.sections import Evaluate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target without weights: whatever gets as far as loading them fails with another message."""
    Qwen3Config(**DIMENSIONS, head_dim=8, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    words = {f"w{number}": number for number in range(60)} | {"<|mask|>": 60}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def start(folder: Path, **drafter: Any) -> None:
    section = {"layers": 2, "block_size": 8, **drafter}
    if "tap_count" not in section:
        section.setdefault("taps", [0, 2])  # the usual rule needs a deeper target
    if "mask_token_id" not in section:
        section.setdefault("mask_token", "<|mask|>")
    recipe = {"target": {"path": str(folder)}, "drafter": section, "threads": 1}
    assemble(configs.load(recipe), lambda text: None)


def refusal(what: Callable[[], None]) -> str:
    with pytest.raises(ConfigError) as caught:
        what()
    assert caught.value.exit_code == 2
    return str(caught.value)


def gets_further(what: Callable[[], None]) -> None:
    """It fails, for there are no weights and no words, but not because the pair is wrong."""
    with pytest.raises(TrainerError) as caught:
        what()
    assert "made for" not in str(caught.value) and "tap" not in str(caught.value)


def test_without_a_mistake_it_gets_as_far_as_the_missing_weights(folder: Path) -> None:
    assert "cannot load the target" in refusal(lambda: start(folder))


@pytest.mark.parametrize(
    ("drafter", "parts"),
    [
        ({"taps": [0, 4]}, ["tap 4 is out of range", "layers 0 to 3"]),
        ({"taps": [0, 3]}, ["tap 3 is the target's last layer"]),
        ({"taps": [-1, 2]}, ["tap -1 is out of range"]),
        ({"taps": [2, 1]}, ["not a rising list"]),
        ({"tap_count": 9}, ["taps", "a target with 4 layers"]),
        ({"mask_token_id": 64}, ["mask token id 64", "64 rows"]),
        ({"mask_token": "<|mask2|>"}, ["no token '<|mask2|>'", "mask_token"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types[1]", "linear_attention"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["sliding_window", "needed"]),
        ({"attention_heads": 3}, ["3 attention heads", "2 key/value heads"]),
    ],
)
def test_recipes_that_do_not_fit_the_target(folder: Path, drafter: dict[str, Any], parts: list[str]) -> None:
    text = refusal(lambda: start(folder, **drafter))
    assert all(part in text for part in parts), text


def test_a_tokenizer_larger_than_the_embedding(folder: Path) -> None:
    change(folder, vocab_size=60)
    text = refusal(lambda: start(folder, mask_token_id=1))
    assert "61 tokens" in text and "'<|mask|>'" in text and "60 rows" in text and "tokenizer.json" in text


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_tokenizer_that_is_none(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    text = refusal(lambda: start(folder))
    assert "cannot read the tokenizer" in text and "tokenizer.json" in text


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_configuration_without_a_needed_key(folder: Path, key: str) -> None:
    change(folder, **{key: ...})
    assert key in refusal(lambda: start(folder))


def test_a_target_whose_layers_are_all_experts(folder: Path) -> None:
    """Such a configuration has no intermediate_size that a drafter could take over."""
    change(folder, intermediate_size=..., moe_intermediate_size=12)
    text = refusal(lambda: start(folder))
    assert "intermediate_size" in text and "train.drafter.intermediate_size" in text
    assert "cannot load the target" in refusal(lambda: start(folder, intermediate_size=32))


@pytest.mark.parametrize("content", ["[]", "3", "{", "\ufeff\x00"])
def test_a_configuration_that_is_none(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(lambda: start(folder))


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ],
    ids=lambda scheme: scheme["quant_method"],
)
def test_a_quantised_target_whose_package_is_missing(folder: Path, scheme: dict[str, Any]) -> None:
    change(folder, quantization_config=scheme)
    text = refusal(lambda: start(folder))
    assert "cannot load the target" in text and "requires" in text.replace("is required", "requires")


def test_code_beside_a_target_is_not_run_and_nobody_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask at the terminal, and wait."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    change(folder, model_type="own", architectures=["Own"], auto_map=names)
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    text = refusal(lambda: start(folder))
    assert "cannot load the target" in text and "transformers itself knows" in text


def test_an_unknown_architecture(folder: Path) -> None:
    change(folder, model_type="never_heard_of", architectures=["NeverForCausalLM"])
    assert "cannot load the target" in refusal(lambda: start(folder))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (CohereConfig(**DIMENSIONS), "logit_scale"),
        (Gemma2Config(**DIMENSIONS, head_dim=8), "final_logit_softcapping"),
        (GraniteConfig(**DIMENSIONS, logits_scaling=8.0), "logits_scaling"),
        (GraniteConfig(**DIMENSIONS, embedding_multiplier=3.0), "embedding_multiplier"),
    ],
)
def test_a_target_that_bends_its_embedding_or_logits(config: Any, key: str) -> None:
    """Its taps would be right, but the drafter would be taught through another embedding or head."""
    model = AutoModelForCausalLM.from_config(config)
    assert key in refusal(lambda: Target(model, (0, 2)))
    plain = AutoModelForCausalLM.from_config(GraniteConfig(**DIMENSIONS))
    assert Target(plain, (0, 2)).layer_count == 4


def test_a_target_that_caps_its_logits_by_a_key_that_is_not_known_here(tmp_path: Path) -> None:
    """Its speculative text would have been another model's: it was trained for, and decoded, uncapped."""
    sizes = {**DIMENSIONS, "num_key_value_heads": 1, "lru_width": 16, "attention_window_size": 32}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(RecurrentGemmaConfig(**sizes, head_dim=8))
    model.get_output_embeddings().weight.data *= 30  # random logits are too small for a cap to tell
    model.save_pretrained(tmp_path)
    text = refusal(lambda: load_target(tmp_path, (0, 2), torch.float32, torch.device("cpu")))
    assert "logits are" in text and str(tmp_path) in text


def test_a_drafter_of_another_target_of_equal_sizes_is_refused_before_weights_are_read(
    folder: Path, tmp_path: Path
) -> None:
    """Made for the target as it stands; then that is replaced by another kind of model of the same shape."""
    raw = read_config(folder)
    section = DrafterSection(layers=1, taps=[0, 2], mask_token_id=1)
    made = drafter_config(section, raw, 1, identify(folder, raw)).to_json()
    other = tmp_path / "drafter"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(made))

    def evaluate() -> None:
        evaluate_checkpoint(other, str(folder), Evaluate(), 0)

    gets_further(evaluate)
    LlamaConfig(**DIMENSIONS, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    text = refusal(evaluate)
    for part in (str(other), "Qwen3ForCausalLM", "LlamaForCausalLM", "model_type qwen3 there, llama here"):
        assert part in text


def test_a_drafter_of_another_target_is_refused_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "block_size": 4,
        "num_target_layers": 4,
        "taps": (0, 2),
        "mask_token_id": 1,
        "layer_types": ("full_attention",),
    }
    other = tmp_path / "drafter"
    other.mkdir()

    def evaluate(**changes: Any) -> None:
        made = DrafterConfig(**{**values, **changes}).to_json()
        (other / "config.json").write_text(json.dumps(made))
        evaluate_checkpoint(other, str(folder), Evaluate(), 0)

    def check(**changes: Any) -> str:
        return refusal(lambda: evaluate(**changes))

    gets_further(evaluate)
    text = check(hidden_size=32, vocab_size=70, num_target_layers=6)
    for part in (
        str(other),
        str(folder),
        "Qwen3ForCausalLM",
        "hidden_size 32 there, 16 here",
        "vocab_size 70",
    ):
        assert part in text
    assert "num_hidden_layers 6 there, 4 here" in text
    assert "mask token id 64" in check(mask_token_id=64)
    assert "tap 3" in check(taps=(0, 3))
