"""A checkpoint's files, read the way each consumer reads them: names, shapes and keys.

z-lab's model, SGLang and vLLM take the same facts from different keys; here every reader is a few lines that
take only what that reader takes, from the raw files.

Run: python -m pytest tests/trainer/oracles/test_checkpoint_contract.py
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_cases import BLOCK, HIDDEN, MASK_ID, TAPS, WORDS, drafter
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from trainer.checkpoint import files as checkpoint
from trainer.checkpoint.drafter import load_drafter
from trainer.errors import ConfigError
from trainer.model.drafter import Drafter
from trainer.model.drafter_config import from_json
from trainer.sections import Optimizer
from trainer.training.optim import DrafterOptimizer

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save(made: Drafter, root: Path) -> Path:
    return checkpoint.save(root, 7, made, DrafterOptimizer(made, Optimizer()), {"why": "a test"}, keep=1)


def header(path: Path) -> dict[str, Any]:
    """The table of contents of a safetensors file: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        table: dict[str, Any] = json.loads(file.read(length))
    table.pop("__metadata__", None)
    return table


def test_names_and_shapes_of_the_weights(tmp_path: Path) -> None:
    """Heads 4 of size 6, key/value heads 2, MLP 24: nothing else, no embedding, no head, no buffer."""
    folder = save(drafter("mixed"), tmp_path)
    layer = {
        "self_attn.q_proj.weight": [4 * 6, HIDDEN],
        "self_attn.k_proj.weight": [2 * 6, HIDDEN],
        "self_attn.v_proj.weight": [2 * 6, HIDDEN],
        "self_attn.o_proj.weight": [HIDDEN, 4 * 6],
        "self_attn.q_norm.weight": [6],
        "self_attn.k_norm.weight": [6],
        "mlp.gate_proj.weight": [24, HIDDEN],
        "mlp.up_proj.weight": [24, HIDDEN],
        "mlp.down_proj.weight": [HIDDEN, 24],
        "input_layernorm.weight": [HIDDEN],
        "post_attention_layernorm.weight": [HIDDEN],
    }
    wanted = {f"layers.{number}.{name}": shape for number in (0, 1) for name, shape in layer.items()}
    wanted |= {"hidden_norm.weight": [HIDDEN], "norm.weight": [HIDDEN]}
    wanted |= {"fc.weight": [HIDDEN, len(TAPS) * HIDDEN]}
    table = header(folder / "model.safetensors")
    assert {name: entry["shape"] for name, entry in table.items()} == wanted
    assert {entry["dtype"] for entry in table.values()} == {"F32"}


def raw_config(made: Drafter, root: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((save(made, root) / "config.json").read_text())
    return data


def test_what_z_labs_model_reads(tmp_path: Path) -> None:
    """Through transformers' Qwen3Config, its config class; layer_types is indexed for every layer."""
    folder = save(drafter("mixed"), tmp_path)
    config = Qwen3Config.from_pretrained(folder)
    assert config.block_size == BLOCK and config.num_target_layers == 4
    assert config.dflash_config["target_layer_ids"] == list(TAPS)
    assert config.dflash_config["mask_token_id"] == MASK_ID
    assert [config.layer_types[layer] for layer in range(config.num_hidden_layers)] == [
        "sliding_attention",
        "full_attention",
    ]
    assert config.sliding_window == 5  # Qwen3Config drops it unless use_sliding_window is true
    assert (config.head_dim, config.vocab_size, config.hidden_act) == (6, WORDS, "silu")
    assert config.tie_word_embeddings is False and config.attention_bias is False


@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_what_sglang_reads(layers: str, tmp_path: Path) -> None:
    data = raw_config(drafter(layers), tmp_path)
    own = data["dflash_config"]
    assert data["architectures"] == ["DFlashDraftModel"] and data["hidden_act"] == "silu"
    assert own.get("block_size", data.get("block_size", 16)) == BLOCK
    assert isinstance(own["mask_token_id"], int) and 0 <= own["mask_token_id"] < data["vocab_size"]
    # Without num_target_layers it would check the taps against the drafter's own layers.
    assert all(0 <= tap < data["num_target_layers"] for tap in own["target_layer_ids"])
    window = data["sliding_window"] if data["use_sliding_window"] else None
    assert window == (5 if layers == "mixed" else None)


@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_what_vllm_reads(layers: str, tmp_path: Path) -> None:
    data = raw_config(drafter(layers), tmp_path)
    own = data["dflash_config"]
    assert data["architectures"] == ["DFlashDraftModel"] and data["model_type"] == "qwen3"
    assert [tap + 1 for tap in own["target_layer_ids"]] == [tap + 1 for tap in TAPS]  # its own count from 1
    assert data["rope_parameters"] == {"rope_type": "default", "rope_theta": 50.0}
    # Either key would make every layer causal, or every layer bidirectional.
    assert "is_causal" not in data and "causal" not in own


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 4.0}])
def test_both_spellings_of_rope_mean_the_drafters_own_frequencies(
    scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    made = drafter("full", rope_scaling=scaling)
    data = raw_config(made, tmp_path)
    wanted = []  # theta^(-2i/E), scaled as the kind says
    for i in range(3):
        frequency = 50.0 ** (-2 * i / 6)
        if scaling is not None and scaling["rope_type"] == "linear":
            frequency /= 4.0
        if scaling is LLAMA3:
            turns = 64 * frequency / (2 * math.pi)  # of the original length
            share = min(1.0, max(0.0, (turns - 1.0) / (4.0 - 1.0)))
            frequency = share * frequency + (1 - share) * frequency / 8.0
        wanted.append(frequency)
    assert made.rotary_emb.inv_freq.tolist() == pytest.approx(wanted, rel=1e-6)
    for without in ([], ["rope_parameters"], ["rope_theta", "rope_scaling"]):
        part = {key: value for key, value in data.items() if key not in without}
        theirs = Qwen3RotaryEmbedding(Qwen3Config.from_dict(part))
        assert torch.equal(theirs.inv_freq, made.rotary_emb.inv_freq), without
        assert from_json(part).rope_parameters == made.config.rope_parameters


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path: Path) -> None:
    made = drafter("mixed")
    folder = save(made, tmp_path)
    back = load_drafter(folder)
    assert back.config == made.config
    for name, tensor in made.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
        (lambda state: state.update({"lm_head.weight": torch.zeros(2)}), "lm_head.weight is not a drafter's"),
        (lambda state: state.update({"fc.weight": torch.zeros(16, 48)}), r"fc.weight has shape \(16, 48\)"),
    ],
)
def test_weights_that_do_not_belong_are_named(change: Any, message: str, tmp_path: Path) -> None:
    folder = save(drafter("full"), tmp_path)
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)
    with pytest.raises(ConfigError, match=message):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layer_types": ["sliding_attention", "strange"]}, "strange"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"use_sliding_window": False}, "use_sliding_window"),
        ({"dflash_config": None}, "dflash_config"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_target_layers": "four"}, "num_target_layers"),
        ({"block_size": 8}, "block_size"),
        ({"is_causal": False}, "is_causal"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused_by_key(
    changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    """Each would otherwise run as another model than the one that was trained, or end in a traceback."""
    folder = save(drafter("mixed"), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError) as caught:
        load_drafter(folder)
    assert part in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "1", "null"])
def test_a_configuration_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    folder = save(drafter("full"), tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_drafter(folder)
