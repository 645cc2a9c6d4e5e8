"""Where transformers' architectures differ in what a drafter needs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError

Model = TypeVar("Model")


def with_attention(make: Callable[[str], Model]) -> Model:
    """What `make` gives with SDPA, or with attention written out for those that SDPA cannot serve: GPT-OSS
    has sinks, others cap scores.

    Raises:
        ValueError: whatever else `make` raises it for.
    """
    try:
        return make("sdpa")
    except ValueError:
        return make("eager")


def decoder_of(model: nn.Module) -> Any:
    """The part that has the layers. Some models (Llama 4) give themselves when asked for it.

    Raises:
        ConfigError: no part has layers of that name.
    """
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    while not hasattr(decoder, "layers") and hasattr(decoder, "model"):
        decoder = decoder.model
    if not hasattr(decoder, "layers"):
        raise ConfigError(
            f"{type(model).__name__} has no decoder with layers, of which taps could be taken",
            where="the target's config.json",
            next="give a target of another architecture",
        )
    return decoder


def scales(model: Any) -> bool:
    """Whether its embedding does more than look rows up: Gemma's multiplies them."""
    return type(model.get_input_embeddings()) is not nn.Embedding


@torch.no_grad()
def as_looked_up(model: Any, table: Tensor) -> Tensor:
    """[V, H] what the model's embedding gives for each id: the table, unless it `scales`.

    Args:
        model: may lie on the meta device; its embedding is used up.
        table: the embedding's weight.
    """
    if not scales(model):
        return table
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # of gradients alone, and no row of the one that stands in
    embedding.weight = nn.Parameter(table[:1].clone(), requires_grad=False)
    model._init_weights(embedding.to_empty(device=table.device))  # its scale is in no file: made anew
    embedding.weight = nn.Parameter(table, requires_grad=False)
    found: Tensor = embedding(torch.arange(len(table), device=table.device))
    return found
