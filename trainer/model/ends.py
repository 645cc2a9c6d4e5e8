"""A target of which only the two ends are here: all that a drafter needs whose hidden states others make.

The layers lie on the meta device: shapes without memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.model.random_target import fill_ends, made_of
from trainer.model.target import Target
from trainer.model.tensors import embedding_and_head


def load_ends(path: Path, taps: Sequence[int], dtype: torch.dtype, device: torch.device) -> Target | None:
    """Embedding and head of the target in `path`, by their names in its safetensors files.

    Returns:
        None: its files or its embedding are of another kind; then it takes the whole target.
    Raises:
        ConfigError: they have other shapes than config.json says.
    """
    model = _layers_nowhere(path, dtype)
    try:
        found = embedding_and_head(path)
    except ConfigError:
        return None
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(embedding) is not nn.Embedding:  # one that scales, say, has more than its weight
        return None
    tied = head.weight is embedding.weight
    if not tied and found["lm_head.weight"] is found["embed_tokens.weight"]:
        return None  # no head in the files, which whoever loads all of them refuses
    taken = {"embed_tokens.weight": embedding} | ({} if tied else {"lm_head.weight": head})
    for name, module in taken.items():
        if found[name].shape != module.weight.shape:
            raise ConfigError(
                f"weight {name} is {tuple(found[name].shape)}, by config.json it should be "
                f"{tuple(module.weight.shape)}",
                where=str(path),
                next="the target's config.json and its weights do not belong together",
            )
    _put(embedding, found["embed_tokens.weight"].to(device, dtype))
    _put(head, embedding.weight if tied else found["lm_head.weight"].to(device, dtype))
    return Target(model, taps)


def random_ends(
    path: Path, taps: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int
) -> Target:
    """The two ends of `trainer.model.random_target.random_target`. Raises ConfigError as that does."""
    model = _layers_nowhere(path, dtype)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    tied = head.weight is embedding.weight
    _put(embedding, torch.empty_like(embedding.weight, device=device))
    _put(head, embedding.weight if tied else torch.empty_like(head.weight, device=device))
    target = Target(model, taps)
    fill_ends(target, seed)
    return target


def keep_ends(target: Target, path: Path) -> Target:
    """The same target without its layers, which give their memory back once `target` is gone."""
    model = _layers_nowhere(path, target.dtype)
    model.set_input_embeddings(target.embedding)  # type: ignore[operator]
    _put(model.get_output_embeddings(), target.head_weight)  # type: ignore[operator]
    return Target(model, target.taps)


def is_whole(target: Target) -> bool:
    """Whether the target's layers are here too."""
    return not any(weight.is_meta for weight in target.model.parameters())


def bytes_of(target: Target) -> int:
    """Bytes of the weights that are here."""
    return sum(weight.nbytes for weight in target.model.parameters() if not weight.is_meta)


def ends_bytes(target: Target) -> int:
    """Bytes of embedding and head; one, where they are tied."""
    ends = {weight.data_ptr(): weight for weight in [*target.embedding.parameters(), target.head_weight]}
    return sum(weight.nbytes for weight in ends.values())


def _layers_nowhere(path: Path, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return made_of(path, dtype)


def _put(module: Any, weight: Tensor) -> None:
    module.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
