"""Drafters and batches of known shapes with random weights and states: a bench needs no target on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.batch import Batch
from trainer.data.packing import Rows
from trainer.model.drafter import Drafter
from trainer.model.drafter_config import DrafterConfig
from trainer.model.tapped_model import States


@dataclass(frozen=True)
class Shape:
    """A drafter and what it needs of its target."""

    hidden: int
    layers: int
    sliding: int  # of the layers, the first ones
    window: int
    ffn: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    taps: int
    block: int
    target_layers: int  # of a dense target of the same hidden size
    target_ffn: int
    target_heads: int

    @property
    def layer_types(self) -> list[str]:
        """Of the drafter, one a layer."""
        return ["sliding_attention"] * self.sliding + ["full_attention"] * (self.layers - self.sliding)


SHAPES = {
    # The drafter of a 27 B target: 1.73 B parameters; its bench target is dense, 23 B.
    "27b": Shape(5120, 5, 0, 2048, 17408, 32, 8, 128, 248_320, 5, 16, 64, 17408, 32),
    "27b-sliding": Shape(5120, 5, 4, 2048, 17408, 32, 8, 128, 248_320, 5, 16, 64, 17408, 32),
    "small": Shape(1024, 2, 0, 2048, 3072, 16, 8, 128, 32_768, 3, 16, 8, 3072, 16),
    "toy": Shape(32, 2, 1, 16, 48, 4, 2, 8, 96, 3, 4, 6, 48, 4),
}


def tap_places(shape: Shape) -> tuple[int, ...]:
    """Spread over the target, the last near its end."""
    last = max(shape.taps - 1, shape.target_layers - 3)
    return tuple(number * last // max(1, shape.taps - 1) for number in range(shape.taps))


def drafter_of(shape: Shape, device: torch.device, seed: int = 0) -> Drafter:
    config = DrafterConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocabulary,
        block_size=shape.block,
        num_target_layers=shape.target_layers,
        taps=tap_places(shape),
        mask_token_id=0,
        layer_types=tuple(shape.layer_types),
        sliding_window=shape.window if shape.sliding else None,
    )
    torch.manual_seed(seed)
    with device:
        return Drafter(config)


@dataclass(frozen=True)
class RandomEnds:
    """A target's two ends, `trainer.training.step.Ends`."""

    embedding: nn.Module
    head_weight: Tensor

    @property
    def device(self) -> torch.device:
        return self.head_weight.device


def ends_of(shape: Shape, device: torch.device) -> RandomEnds:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        embedding = nn.Embedding(shape.vocabulary, shape.hidden, dtype=dtype).requires_grad_(False)
        head = 0.02 * torch.randn(shape.vocabulary, shape.hidden, dtype=dtype)
    return RandomEnds(embedding, head)


def batch_of(shape: Shape, rows: int, row_tokens: int, device: torch.device, seed: int = 0) -> Batch:
    """Rows of one document each, all of it trained on, and random states."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (rows, row_tokens)
    tokens = torch.randint(1, shape.vocabulary, size, generator=generator, device=device)
    positions = torch.arange(row_tokens, device=device).expand(size).contiguous()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    taps = torch.randn(*size, shape.taps * shape.hidden, generator=generator, device=device, dtype=dtype)
    made = Rows(tokens, torch.zeros_like(tokens), positions, torch.ones_like(tokens, dtype=torch.bool))
    return Batch(made, States(taps))


def target_config(shape: Shape, vocabulary: int, tied: bool) -> Any:
    """The config.json of a dense Qwen3 with as many key and value heads as the drafter."""
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.target_ffn,
        num_hidden_layers=shape.target_layers,
        num_attention_heads=shape.target_heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=tied,
    )
