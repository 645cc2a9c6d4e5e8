"""Tensors of safetensors files, whole or sharded, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import ConfigError
from trainer.model.folder import header, weight_files
from trainer.model.target_files import read_config
from trainer.shortage import is_shortage

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_tensors(
    paths: Iterable[Path], wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The tensors whose names are wanted.

    Raises:
        ConfigError: a file that is damaged, a name in two shards, or a tensor that is no plain float.
    """
    found: dict[str, Tensor] = {}
    for path in paths:
        dtypes = {name: entry["dtype"] for name, entry in header(path).items() if wanted(name)}
        for name, dtype in dtypes.items():
            if dtype not in FLOATS:
                raise ConfigError(
                    f"weight {name} is {dtype}; only {', '.join(FLOATS)} can be read",
                    where=str(path),
                    next="take a checkpoint that is not quantised",
                )
            if name in found:
                raise ConfigError(f"weight {name} is in two files", where=str(path))
        try:
            with safe_open(path, framework="pt") as file:  # once: each time maps the whole file anew
                found |= {name: file.get_tensor(name) for name in dtypes}
        except (OSError, SafetensorError) as error:
            if is_shortage(error):
                raise
            raise ConfigError(f"cannot read the weights: {error}", where=str(path)) from None
    return found


def embedding_and_head(target: Path, next: str = "") -> dict[str, Tensor]:
    """The target's embedding and head under a drafter's names, without loading the rest of it.

    Args:
        next: what helps where that cannot be.
    Raises:
        ConfigError: its files do not hold exactly one of them.
    """
    paths = weight_files(target)
    tied = read_config(target).get("tie_word_embeddings")
    names = [name for path in paths for name in header(path)]
    embeddings = [name for name in names if name.endswith("embed_tokens.weight")]
    heads = [name for name in names if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
    if tied or not heads:
        heads = embeddings
    if len(embeddings) != 1 or len(heads) != 1:
        raise ConfigError(
            f"no single embedding and head among the target's weights: {embeddings}, {heads}",
            where=str(target),
            next=next,
        )
    tensors = read_tensors(paths, lambda name: name in (embeddings[0], heads[0]))
    return {"embed_tokens.weight": tensors[embeddings[0]], "lm_head.weight": tensors[heads[0]]}
