"""Where transformers' architectures differ in what a drafter needs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.shortage import is_shortage
from trainer.words import first_line

Model = TypeVar("Model")


@contextmanager
def told_by_transformers(what: str, where: Path, next: str) -> Iterator[None]:
    """What transformers cannot do inside becomes a ConfigError: `what`, and the first line of its reason.

    A package that a quantised model needs and that is missing is such a reason; too little memory is none.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()  # a log file is no place for it
    logging.set_verbosity_error()  # what matters of its warnings is refused by whoever calls
    reasons = (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        ImportError,
        SafetensorError,
        StrictDataclassError,
    )
    try:
        yield
    except reasons as error:
        if is_shortage(error):
            raise
        # A configuration that contradicts itself names only its validator; the reason is the cause.
        told = error.__cause__ if isinstance(error, StrictDataclassError) else error
        raise ConfigError(f"{what}: {first_line(told or error)}", where=str(where), next=next) from error


def config_of(path: Path) -> Any:
    """transformers' configuration of the model in `path`; code that lies beside it is never run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


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


def pretrained(path: Path, dtype: torch.dtype, **more: Any) -> Any:
    """transformers' causal language model of the folder `path`: by what lies there alone, whose code is never
    run. Within `told_by_transformers`.

    Args:
        more: further words for `from_pretrained`, which then may give more than the model.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(path)
    return with_attention(
        lambda kind: AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation=kind,
            **more,
        )
    )


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


def layer_types_of(config: Any) -> list[str]:
    """The kind of each layer, as transformers' caches take it: where a configuration names none, all layers
    slide (Mistral, Phi 3), or all attend within chunks, if it tells a size for that.
    """
    said = getattr(config, "layer_types", None)
    if said:
        return list(said)
    if getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "full_attention"
    return [kind] * int(config.num_hidden_layers)


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
