"""A target of random weights, made where it is used: rates, layouts and memory are measured with it before
tens of gigabytes lie on a disk. Nothing that a drafter learns from it is worth anything, and log, report and
checkpoints say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.errors import ConfigError
from trainer.model.target import Target

RANDOM = "random"
WORTHLESS = (
    "WARNING: the target's weights are random (train.target.weights): rates and memory are real, whatever is "
    "learnt from it is worth nothing"
)


def random_target(
    path: Path, taps: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int
) -> Target:
    """The model of `path`/config.json with random weights, equal for equal seeds on devices of one kind.

    It is made on the device at once, in `dtype`. Generators are left as they were.

    Raises:
        ConfigError: transformers has no such decoder, or its configuration contradicts itself.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    here = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.random.fork_rng(devices=here), device:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first = str(error.__cause__ or error).strip().split("\n")[0]
        raise ConfigError(
            f"transformers cannot make the target: {first}",
            where=str(path / "config.json"),
            next="it must be the config.json of a decoder that transformers knows",
        ) from error
    return Target(model, taps)
