"""A target of random weights, made where it is used: rates, layouts and memory are measured with it before
tens of gigabytes lie on a disk. Nothing that a drafter learns from it is worth anything, and log, report and
checkpoints say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from trainer.model.architectures import config_of, told_by_transformers, with_attention
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
    here = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=here), device:
        torch.manual_seed(seed)
        target = Target(made_of(path, dtype), taps)
    fill_ends(target, seed)
    return target


@torch.no_grad()
def fill_ends(target: Target, seed: int) -> None:
    """Embedding and head anew, from numbers of their own: they are the same where there is nothing else."""
    deviation = float(getattr(target.config, "initializer_range", 0.02))
    for number, weight in enumerate([target.head_weight, *target.embedding.parameters()]):
        if number and weight.data_ptr() == target.head_weight.data_ptr():
            continue
        generator = torch.Generator(weight.device).manual_seed(2 * seed + number)
        weight.normal_(0.0, deviation, generator=generator)


def made_of(path: Path, dtype: torch.dtype) -> nn.Module:
    """The model of a config.json, as it begins, on the default device. Raises ConfigError."""
    from transformers import AutoModelForCausalLM

    with told_by_transformers(
        "transformers cannot make the target",
        path / "config.json",
        "it must be the config.json of a decoder that transformers itself knows",
    ):
        config = config_of(path)
        return with_attention(
            lambda kind: AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=kind, trust_remote_code=False
            )
        )
