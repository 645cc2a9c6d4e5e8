"""What the trainers in bench/peers.py share: sizes, optimizer, and the word of one that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.bench.shapes import Shape

Step = Callable[[], object]
GAMMA = 7.0  # of the loss's decay along a block


class Absent(Exception):
    """A trainer that is not on this machine, and how it gets there."""


@dataclass(frozen=True)
class Peer:
    """A trainer, ready to be timed."""

    step: Step  # forward, backward, clipping and update
    anchors: int  # of one step, as the trainer's own sampler draws them


def updated(model: nn.Module, backward: Step, masters: bool = False) -> Step:
    """A whole step with the optimizer that all get.

    Args:
        backward: forward and backward; gradients are left in the parameters.
        masters: the optimizer keeps float32 weights of its own, of which the model's are copies.
    """
    trained: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    owned = [
        each.detach().to(torch.float32, copy=True).requires_grad_() if masters else each for each in trained
    ]
    optimizer = torch.optim.AdamW(owned, lr=1e-4, fused=True)

    def whole() -> None:
        backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        if masters:
            for own, copy in zip(owned, trained, strict=True):
                assert copy.grad is not None
                own.grad, copy.grad = copy.grad.float(), None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(trained, owned)

    return whole


def qwen3_config(shape: Shape, attention: str) -> Any:
    """The drafter's sizes as the configuration that other trainers read."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        layer_types=shape.layer_types,
        use_sliding_window=shape.sliding > 0,
        sliding_window=shape.window if shape.sliding else None,
        tie_word_embeddings=False,
    )
    config._attn_implementation = attention
    return config
