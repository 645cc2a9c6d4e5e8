"""Tiny targets, drafters and rows for the oracles; random weights, large enough that every mistake shows."""

from __future__ import annotations

from typing import Any

import torch
from slow_drafter import Shape
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer import config as configs
from trainer.data.packing import Document
from trainer.model.drafter import Drafter
from trainer.model.drafter_config import DrafterConfig
from trainer.sections import TrainConfig

WORDS, HIDDEN, BLOCK, MASK_ID = 64, 16, 4, 1
TAPS = (0, 2)
LAYERS: dict[str, tuple[str, ...]] = {
    "full": ("full_attention",) * 2,
    "sliding": ("sliding_attention",) * 2,
    "mixed": ("sliding_attention", "full_attention"),
}
WINDOW = 5
DIMENSIONS: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


def qwen3(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(
        Qwen3Config(**DIMENSIONS, head_dim=8, tie_word_embeddings=False)
    )
    return model.eval()


def drafter(layers: str, seed: int = 0, **changes: Any) -> Drafter:
    types = LAYERS[layers]
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": len(types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,  # on purpose not hidden / heads
        "vocab_size": WORDS,
        "block_size": BLOCK,
        "num_target_layers": 4,
        "taps": TAPS,
        "mask_token_id": MASK_ID,
        "layer_types": types,
        "sliding_window": WINDOW if "sliding_attention" in types else None,
        "rope_theta": 50.0,  # small, so that a position off by one turns far
    }
    made = Drafter(DrafterConfig(**{**values, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if name.endswith("norm.weight") else 0.35 * noise
    return made


def shape_of(made: Drafter) -> Shape:
    config = made.config
    windows = tuple(
        config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types
    )
    return Shape(
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.rms_norm_eps,
        config.rope_theta,
        windows,
    )


def weights_of(made: Drafter, gradients: bool = False) -> dict[str, Tensor]:
    """The weights in float64, as leaves of their own."""
    return {
        name: tensor.detach().double().clone().requires_grad_(gradients)
        for name, tensor in made.state_dict().items()
    }


def settings(precision: str = "float32", **objective: Any) -> TrainConfig:
    gamma = None if objective.get("weighting") == "dpace" else 3.0
    section: dict[str, Any] = {
        "target": {"path": "unused"},
        "drafter": {"mask_token_id": MASK_ID, "block_size": BLOCK},
        "objective": {"anchors_per_document": 100, "gamma": gamma, **objective},
        "precision": precision,
    }
    return configs.load(section)


def documents(sizes: tuple[int, ...] = (12, 9, 7), seed: int = 5) -> list[Document]:
    """Random tokens, the first two unsupervised, and one hole in each loss mask."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, size in enumerate(sizes):
        tokens = torch.randint(2, WORDS, (size,), generator=generator).tolist()
        made.append(Document(tokens, [place >= 2 and place != 5 + number for place in range(size)]))
    return made
