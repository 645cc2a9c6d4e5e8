"""Whether the ranks of a run each keep all of the optimizer's state, or a share of it."""

from __future__ import annotations

import torch

from trainer.errors import ConfigError
from trainer.machine import available_memory
from trainer.sections import TrainConfig
from trainer.topology.ranks import Ranks
from trainer.training.optim import Share, unshareable

STATE_BYTES = 16
"""A parameter's gradient, its place in the sum over ranks, and two moments, in float32."""
SHORT = 0.5
"""Memory is short where this state would take more of what is free: a step's pass wants the rest."""


def problem(config: TrainConfig) -> str | None:
    """Why the ranks of a run cannot share the optimizer out, if they cannot."""
    if config.topology not in ("colocated", "auto"):
        return f"topology {config.topology} does not"
    return unshareable(config.optimizer)


def decide(wish: str, state_bytes: float, free_bytes: float | None, problem: str | None) -> tuple[bool, str]:
    """(whether, why). `wish`: as `layout.shard_optimizer`.

    Args:
        state_bytes: a rank's gradients and moments.
        free_bytes: what a rank has for them and for a step's pass; None: unknown.
    """
    if wish == "off" or (wish == "auto" and problem is not None):
        return False, problem or "the recipe says so"
    if wish == "on":
        return True, "the recipe says so"
    if free_bytes is None:
        return False, "how much memory is free is not known"
    told = f"gradients and moments take {state_bytes / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} GiB are free"
    return state_bytes > SHORT * free_bytes, told


def share_of(
    config: TrainConfig, parameters: int, device: torch.device, ranks: Ranks | None
) -> tuple[Share | None, str]:
    """This rank's share of the optimizer, None: all of it; and why. The first rank decides for all.

    Args:
        parameters: how many numbers are trained; weights and target are in memory already.
    Raises:
        ConfigError: the recipe wants it, and it cannot be. PeerLost.
    """
    if ranks is None or ranks.size == 1:
        return None, "there is one process"
    wish, reason = config.layout.shard_optimizer, problem(config)
    if wish == "on" and reason is not None:
        raise ConfigError(
            f"the optimizer cannot be shared out: {reason}",
            where="train.layout.shard_optimizer",
            next="say auto or off",
        )
    free: float | None
    if device.type == "cuda":
        free = float(torch.cuda.mem_get_info(device)[0])
    else:
        available = available_memory()
        free = None if available is None else available / ranks.size
    shared, why = decide(wish, STATE_BYTES * parameters, free, reason)
    shared = bool(ranks.from_first([shared], "the optimizer to be shared out")[0])
    return (Share(ranks.rank, ranks.size) if shared else None), why
