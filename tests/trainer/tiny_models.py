"""Tiny targets with random weights, made here: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, SmolLM3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,  # large, so that the logits of random weights are far apart
}


def target_config(kind: str) -> Any:
    """Configurations of the architectures that the trainer names."""
    if kind == "qwen3":
        return Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)
    if kind == "qwen3-sliding":
        layers = ["full_attention", "sliding_attention"] * 3
        return Qwen3Config(**SIZES, head_dim=8, layer_types=layers, sliding_window=7, use_sliding_window=True)
    if kind == "llama":
        return LlamaConfig(**SIZES)
    if kind == "mistral":  # every layer slides, and none is named
        return MistralConfig(**SIZES, sliding_window=7)
    if kind == "smollm":
        return SmolLM3Config(**SIZES)
    if kind == "qwen3.5":
        return Qwen3_5TextConfig(
            **SIZES,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    raise ValueError(kind)


KINDS = ["qwen3", "qwen3-sliding", "llama", "mistral", "smollm", "qwen3.5"]


def random_model(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(target_config(kind))
    return model.eval()


def save_target(folder: Path, kind: str = "qwen3") -> Path:
    """A target on disk with a tokenizer of single bytes, as a recipe names it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate(["<|endoftext|>", "<|mask|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = target_config(kind)
    config.vocab_size = len(ids)
    config.eos_token_id = 0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
