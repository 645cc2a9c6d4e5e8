"""An optimizer's masters and moments as named tensors, and back.

Named by parameter and not by number, so that no checkpoint depends on the order of groups or parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.training.optim import DrafterOptimizer

SEPARATOR = "|"  # in no parameter's name


def masters(optimizer: DrafterOptimizer) -> dict[str, Tensor]:
    """The float32 weights that are trained, by parameter."""
    return {each.name: master for each, master in zip(optimizer.assigned, optimizer.masters, strict=True)}


def moments(optimizer: DrafterOptimizer) -> dict[str, Tensor]:
    """What the algorithms remember, as "moment|parameter"; empty before the first step."""
    found: dict[str, Tensor] = {}
    for names, algorithm in _groups(optimizer):
        for number, state in algorithm.state_dict()["state"].items():
            found.update({f"{key}{SEPARATOR}{names[number]}": value for key, value in state.items()})
    return found


@torch.no_grad()
def load(optimizer: DrafterOptimizer, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Take over masters and moments, bit for bit.

    Raises:
        KeyError: a weight, or a moment of a parameter that has others, is missing.
    """
    for each, parameter, master in zip(
        optimizer.assigned, optimizer.parameters, optimizer.masters, strict=True
    ):
        master.copy_(weights[each.name])
        if parameter is not master:
            parameter.copy_(master)
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.items():
        key, _, parameter_name = name.partition(SEPARATOR)
        by_parameter.setdefault(parameter_name, {})[key] = value
    for names, algorithm in _groups(optimizer):
        state = {number: by_parameter[name] for number, name in enumerate(names)} if saved else {}
        algorithm.load_state_dict({"state": state, "param_groups": algorithm.state_dict()["param_groups"]})


@torch.no_grad()
def forget(optimizer: DrafterOptimizer, weights: Mapping[str, Tensor]) -> None:
    """Back to these weights and to no moments: the state before the first step."""
    for _, algorithm in _groups(optimizer):
        algorithm.state.clear()
    load(optimizer, weights, {})


def _groups(optimizer: DrafterOptimizer) -> list[tuple[list[str], torch.optim.Optimizer]]:
    """Each group's parameter names, in the order of its algorithm's numbers, and the algorithm."""
    return [
        ([each.name for each in optimizer.assigned if each.group is group], algorithm)
        for group, algorithm in zip(optimizer.section.groups, optimizer.algorithms, strict=True)
    ]
