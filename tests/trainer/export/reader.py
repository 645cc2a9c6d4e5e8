"""A reader of drafters in z-lab's layout, written from the contract alone: it knows the keys and names that
z-lab's code, SGLang and vLLM take, parses the files by hand, and drafts with plain arithmetic.

It shares no line with the trainer. Where two readers take a fact from different keys, both are looked at.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from slow_drafter import Shape, draft
from torch import Tensor, nn

BYTES = {"BF16": torch.bfloat16, "F32": torch.float32}


def tensors_of(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of a safetensors file, and its table of contents."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    table = json.loads(content[8 : 8 + length])
    assert table.pop("__metadata__") == {"format": "pt"}  # z-lab's loader asks for it
    found, end = {}, 0
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == end, "a gap between tensors"
        end = stop
        raw = bytearray(content[8 + length + start : 8 + length + stop])
        found[name] = torch.frombuffer(raw, dtype=BYTES[entry["dtype"]]).view(entry["shape"])
    assert 8 + length + end == len(content)
    return found, table


@dataclass
class Reader:
    """What a server knows of the drafter after reading its folder."""

    weights: dict[str, Tensor]
    table: dict[str, Any]
    shape: Shape
    taps: list[int]
    mask_id: int
    block: int


def read(folder: Path) -> Reader:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    own = config["dflash_config"]
    # z-lab reads the top level, SGLang dflash_config first.
    assert config["block_size"] == own["block_size"]
    # z-lab needs it even when the layers are named; SGLang checks the layers against it.
    assert all(0 <= tap < config["num_target_layers"] for tap in own["target_layer_ids"])
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["hidden_act"] == "silu" and config["tie_word_embeddings"] is False
    assert "auto_map" not in config  # it would promise a dflash.py in the folder
    # transformers 4 reads rope_theta and rope_scaling, transformers 5 and vLLM rope_parameters.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["rope_scaling"] is None and config["rope_parameters"]["rope_type"] == "default"
    windows = []
    for kind in config["layer_types"]:
        assert kind in ("full_attention", "sliding_attention")
        slides = kind == "sliding_attention"
        assert config["use_sliding_window"] or not slides  # Qwen3Config drops the window otherwise
        windows.append(config["sliding_window"] if slides else None)
    assert len(windows) == config["num_hidden_layers"]
    weights, table = tensors_of(folder / "model.safetensors")
    shape = Shape(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["rms_norm_eps"],
        config["rope_theta"],
        tuple(windows),
    )
    assert weights["layers.0.self_attn.q_norm.weight"].shape == (config["head_dim"],)
    return Reader(weights, table, shape, own["target_layer_ids"], own["mask_token_id"], config["block_size"])


@torch.no_grad()
def drafted(reader: Reader, target: nn.Module, text: list[int]) -> Tensor:
    """[B-1, V] logits for the tokens after text's last one, in float64, with a transformers target.

    Tap i is the output of layer i: entry i + 1 of `hidden_states`, whose first is the embedding.
    """
    tokens = torch.tensor([text[:-1]])
    states = target(tokens, output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap + 1][0] for tap in reader.taps], dim=-1)
    block = torch.tensor([text[-1]] + [reader.mask_id] * (reader.block - 1))
    embedded = target.get_input_embeddings()(block)  # type: ignore[operator]
    weights = {name: tensor.double() for name, tensor in reader.weights.items()}
    hidden = draft(weights, reader.shape, taps.double(), embedded.double())
    head: Tensor = target.get_output_embeddings().weight  # type: ignore[operator]
    return hidden[1:] @ head.double().T
