"""Taps on targets as they lie on disk: every architecture that the trainer names, wrapped, tied, of experts,
with prediction layers.

The reference is transformers' own model, loaded by itself from the same folder: `hidden_states[i + 1]`.

Run: python -m pytest tests/trainer/oracles/test_targets_oracle.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_cases import DIMENSIONS
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
)

from trainer.model.pair import drafter_config
from trainer.model.target import Target, load_target
from trainer.model.target_files import read_config
from trainer.sections import Drafter as DrafterSection

LINEAR: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
PLAIN = {key: value for key, value in DIMENSIONS.items() if key != "intermediate_size"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GLM: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "num_nextn_predict_layers": 1,
}


def configuration(kind: str) -> PreTrainedConfig:
    made: dict[str, Any] = {
        "qwen3": lambda: Qwen3Config(**DIMENSIONS, head_dim=8, tie_word_embeddings=False),
        "llama with llama3 rope": lambda: LlamaConfig(**DIMENSIONS, rope_parameters=LLAMA3),
        "smollm (tied llama)": lambda: LlamaConfig(**DIMENSIONS, tie_word_embeddings=True),
        "smollm3 (layers without rope)": lambda: SmolLM3Config(**DIMENSIONS, no_rope_layers=[1, 1, 0, 1]),
        "qwen3.5": lambda: Qwen3_5TextConfig(**DIMENSIONS, **LINEAR),
        "qwen3.5 with experts": lambda: Qwen3_5MoeTextConfig(
            **PLAIN, **LINEAR, **EXPERTS, shared_expert_intermediate_size=12
        ),
        "qwen3-next": lambda: Qwen3NextConfig(
            **DIMENSIONS, **LINEAR, **EXPERTS, shared_expert_intermediate_size=12
        ),
        "gpt-oss (sinks, for which SDPA has no place)": lambda: GptOssConfig(
            **DIMENSIONS, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=7
        ),
        "gemma3": lambda: Gemma3TextConfig(**DIMENSIONS, head_dim=8, sliding_window=7),
        "llama4 (gives itself for its decoder)": lambda: Llama4TextConfig(
            **DIMENSIONS, head_dim=8, num_local_experts=4, intermediate_size_mlp=24
        ),
        "glm4 with a prediction layer": lambda: Glm4MoeConfig(**DIMENSIONS, **GLM),
    }
    config: PreTrainedConfig = made[kind]()
    return config


KINDS = [
    "qwen3",
    "llama with llama3 rope",
    "smollm (tied llama)",
    "smollm3 (layers without rope)",
    "qwen3.5",
    "qwen3.5 with experts",
    "qwen3-next",
    "gpt-oss (sinks, for which SDPA has no place)",
    "gemma3",
    "llama4 (gives itself for its decoder)",
    "glm4 with a prediction layer",
]
WRITTEN_OUT = {"gpt-oss (sinks, for which SDPA has no place)"}


def save(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(kind))
    model.save_pretrained(folder)
    if kind == "glm4 with a prediction layer":
        # Such checkpoints hold the prediction layer as one layer more, which transformers leaves out.
        path = folder / "model.safetensors"
        weights = load_file(path)
        extra = {
            name.replace("layers.3.", "layers.4."): 9 * tensor
            for name, tensor in weights.items()
            if "layers.3." in name
        }
        assert extra
        save_file({**weights, **extra}, path, metadata={"format": "pt"})
    return folder


def tokens_of(rows: int = 2, size: int = 18) -> Tensor:
    return torch.randint(2, 60, (rows, size), generator=torch.Generator().manual_seed(3))


def places(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


@torch.no_grad()
def reference(model: nn.Module, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    said = model(tokens, output_hidden_states=True)
    return torch.cat([said.hidden_states[tap + 1] for tap in taps], -1), said.logits


@pytest.mark.parametrize("kind", KINDS)
def test_taps_of_a_target_on_disk(kind: str, tmp_path: Path) -> None:
    folder, tokens = save(kind, tmp_path / "target"), tokens_of()
    way = "eager" if kind in WRITTEN_OUT else "sdpa"
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=way).eval()
    for taps in ((0, 2), (1,), (0, 1, 2)):
        wanted, logits = reference(own, tokens, taps)
        target = load_target(folder, taps, torch.float32, torch.device("cpu"))
        assert target.layer_count == 4
        assert torch.equal(target.run(tokens, places(tokens)).taps, wanted)
        whole = target.run(tokens, places(tokens), full=True)
        assert whole.final is not None and torch.equal(whole.taps, wanted)
        assert torch.allclose(target.logits(whole.final), logits, atol=1e-6)
    # And the drafter that a recipe without wishes would get has this target's dimensions.
    wish = DrafterSection(layers=1, intermediate_size=24)
    shape = drafter_config(wish, read_config(folder), 1)
    assert (shape.hidden_size, shape.vocab_size) == (target.hidden_size, target.vocabulary)
    assert shape.num_target_layers == 4


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_run_counted_by_hooks(kind: str, tmp_path: Path) -> None:
    folder, tokens = save(kind, tmp_path / "target"), tokens_of()
    target = load_target(folder, (0, 1), torch.float32, torch.device("cpu"))
    ran: list[str] = []
    for name, module in target.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    stem = next(name for name, module in target.model.named_modules() if name.endswith("layers.0"))[:-1]
    layers = [f"{stem}{number}" for number in range(4)]
    head = next(
        name
        for name, module in target.model.named_modules()
        if module is target.model.get_output_embeddings()  # type: ignore[operator]
    )
    target.run(tokens, places(tokens))
    assert [name for name in ran if name in layers] == layers[:2]
    assert not any(name.startswith((layers[2], layers[3])) for name in ran) and head not in ran
    ran.clear()
    target.run(tokens, places(tokens), full=True)
    assert [name for name in ran if name in layers] == layers and head not in ran


def test_the_attention_that_a_target_was_saved_with_is_not_asked_for(tmp_path: Path) -> None:
    """Some config.json name a package's attention, which is not here."""
    path = save("qwen3", tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "_attn_implementation": "flash_attention_2"}))
    target = load_target(tmp_path, (0, 2), torch.float32, torch.device("cpu"))
    assert target.config._attn_implementation == "sdpa"


def test_a_target_wrapped_with_its_vision_part(tmp_path: Path) -> None:
    """As the Qwen3.5 and 3.6 models are published: text_config inside, weights under model.language_model."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    text = {**configuration("qwen3.5").to_dict(), "rope_parameters": rope}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    whole.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert any(name.startswith("model.language_model.layers.0.") for name in names)
    tokens = tokens_of()
    wanted, logits = reference(whole, tokens, (0, 2))
    target = load_target(tmp_path, (0, 2), torch.float32, torch.device("cpu"))
    states = target.run(tokens, places(tokens), full=True)
    assert states.final is not None
    assert torch.allclose(states.taps, wanted, atol=1e-6)
    assert torch.allclose(target.logits(states.final), logits, atol=1e-5)
    raw = read_config(tmp_path)
    assert raw["hidden_size"] == 16 and raw["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    shape = drafter_config(DrafterSection(layers=1), raw, 1)
    assert shape.num_target_layers == 4 and shape.rope_theta == 1e7


def test_a_prediction_layer_named_only_in_the_configuration(tmp_path: Path) -> None:
    """mtp_num_hidden_layers and weights under mtp.*, as Qwen3.5 ships them: taps and counts stay the same."""
    folder, tokens = save("qwen3.5", tmp_path), tokens_of()
    before = load_target(folder, (0, 2), torch.float32, torch.device("cpu")).run(tokens, places(tokens)).taps
    path = folder / "model.safetensors"
    weights = load_file(path)
    extra = {
        f"mtp.{name.split('model.')[1]}": 9 * tensor for name, tensor in weights.items() if ".3." in name
    }
    save_file({**weights, **extra}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    target = load_target(folder, (0, 2), torch.float32, torch.device("cpu"))
    assert extra and torch.equal(target.run(tokens, places(tokens)).taps, before)
    assert drafter_config(DrafterSection(layers=1), read_config(folder), 1).num_target_layers == 4


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5", "smollm3 (layers without rope)"])
@torch.no_grad()
def test_documents_of_a_row_are_read_as_if_alone(kind: str) -> None:
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(configuration(kind)), (0, 2))
    tokens, lengths = tokens_of(1, 24), (9, 1, 14)
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    positions = torch.tensor([[place for length in lengths for place in range(length)]])
    packed = target.states(tokens, positions, documents, full=True)
    assert packed.final is not None
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        wanted, logits = reference(target.model, tokens[:, part], (0, 2))
        assert torch.allclose(packed.taps[:, part], wanted, atol=1e-5)
        assert torch.allclose(target.logits(packed.final[:, part]), logits, atol=1e-4)
        start += length
