"""Starting weights of a drafter. A warm start copies layers of the target itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.errors import ConfigError
from trainer.model.drafter import Drafter
from trainer.model.target import Target


@torch.no_grad()
def copy_target_layers(drafter: Drafter, target: Target, layers: Sequence[int] | None = None) -> None:
    """Copy layers of the target and its final norm; `fc` passes on one tap.

    All drafter layers read one context. It begins as what the middle one of the copied layers read in the
    target: `fc` is the identity on the tap nearest to that layer's input, `hidden_norm` its input norm. Small
    noise on the other taps makes them trainable from the first step.

    Args:
        layers: one for each drafter layer; None: the target's last ones.
    Raises:
        ConfigError: no such layer, or the target's layers have other shapes or parameters than the drafter's.
    """
    count = len(drafter.layers)
    chosen = range(target.layer_count - count, target.layer_count) if layers is None else layers
    where = "train.drafter.init_layers"
    for index in chosen:
        if not 0 <= index < target.layer_count:
            raise ConfigError(
                f"layer {index} is out of range: the target has layers 0 to {target.layer_count - 1}",
                where=where,
            )
    source = [target.decoder.layers[index] for index in chosen]
    for mine, theirs in zip(drafter.layers, source, strict=True):
        own, given = mine.state_dict(), theirs.state_dict()
        unlike = [name for name in own if name not in given or given[name].shape != own[name].shape]
        unlike += [name for name in given if name not in own]
        if unlike:
            raise ConfigError(
                f"the target's layers do not fit the drafter's ({unlike[0]} first)",
                where="train.drafter.init",
                next="use init: random, or leave the drafter's dimensions to the target",
            )
        mine.load_state_dict({name: tensor.float() for name, tensor in given.items()})
    drafter.norm.weight.copy_(target.decoder.norm.weight)
    middle = count // 2
    drafter.hidden_norm.weight.copy_(source[middle].input_layernorm.weight)
    read = chosen[middle] - 1
    nearest = min(range(len(target.taps)), key=lambda index: abs(target.taps[index] - read))
    hidden = drafter.config.hidden_size
    torch.nn.init.normal_(drafter.fc.weight, std=0.02 / len(target.taps))
    passed = drafter.fc.weight[:, nearest * hidden : (nearest + 1) * hidden]
    passed += torch.eye(hidden, device=passed.device)
