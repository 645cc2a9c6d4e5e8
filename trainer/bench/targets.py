"""A dense target of random weights, and the matrix products of its prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.bench.flops import Product
from trainer.bench.shapes import Shape, tap_places, target_config
from trainer.model.target import Target
from trainer.model.within import first_seen


def target_products(shape: Shape, tokens: int, layers: int) -> list[Product]:
    """Forward of a dense target's first layers, as many key and value heads as the drafter."""
    width = shape.target_heads * shape.head_size
    narrow = shape.key_value_heads * shape.head_size
    return [
        Product("q", tokens, shape.hidden, width, layers, ()),
        Product("k, v", tokens, shape.hidden, narrow, 2 * layers, ()),
        Product("o", tokens, width, shape.hidden, layers, ()),
        Product("gate, up", tokens, shape.hidden, shape.target_ffn, 2 * layers, ()),
        Product("down", tokens, shape.target_ffn, shape.hidden, layers, ()),
    ]


def make_target(shape: Shape, device: torch.device) -> Target:
    """A dense Qwen3 with random weights; its head is not used, so its vocabulary is small."""
    from transformers import AutoModelForCausalLM

    config = target_config(shape, vocabulary=1024, tied=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return Target(model, tap_places(shape))


def documents_of(rows: int, row_tokens: int, count: int, seed: int = 0) -> Tensor:
    """[rows, row_tokens] numbers of documents, `count` a row, of random lengths, at least a token each."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.zeros(rows, row_tokens, dtype=torch.int64)
    for row in begins:
        row[1 + torch.randperm(row_tokens - 1, generator=generator)[: count - 1]] = 1
    return begins.cumsum(1)


def causal_pairs(documents: Tensor) -> int:
    """(query, key) pairs of causal attention within documents, itself included."""
    index = torch.arange(documents.shape[1], device=documents.device)
    return int((index - first_seen(documents, None) + 1).sum())
