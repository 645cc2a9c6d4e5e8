"""An optimizer's masters and moments as named tensors, and back.

Named by parameter and not by number, so that no checkpoint depends on the order of groups or parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trainer.training.optim import DrafterOptimizer

SEPARATOR = "|"  # in no parameter's name


def masters(optimizer: DrafterOptimizer) -> dict[str, Tensor]:
    """The float32 weights that are trained, by parameter; whole also where each rank trains a share."""
    of = optimizer.masters if optimizer.share is None else optimizer.parameters
    return {each.name: master for each, master in zip(optimizer.assigned, of, strict=True)}


def moments(optimizer: DrafterOptimizer) -> dict[str, Tensor]:
    """What the algorithms remember, as "moment|parameter"; empty before the first step.

    Of a share: its pieces.
    """
    found: dict[str, Tensor] = {}
    for names, algorithm in _groups(optimizer):
        for number, state in algorithm.state_dict()["state"].items():
            found.update({f"{key}{SEPARATOR}{names[number]}": value for key, value in state.items()})
    return found


def whole_moments(optimizer: DrafterOptimizer) -> Iterator[tuple[str, Tensor]]:
    """`moments`, one after the other; of a share, put together from all owners, who all do it to the end.
    What is given is then good until the next.
    """
    held = moments(optimizer)
    if optimizer.owners is None:
        yield from held.items()
        return
    names = [each.name for each in optimizer.assigned]
    for key in sorted({name.partition(SEPARATOR)[0] for name in held}):
        pieces = [held[f"{key}{SEPARATOR}{name}"] for name in names]
        if all(piece.shape == master.shape for piece, master in zip(pieces, optimizer.masters, strict=True)):
            pieces = optimizer.owners.whole(pieces, key)
        yield from ((f"{key}{SEPARATOR}{name}", piece) for name, piece in zip(names, pieces, strict=True))


def whole_shapes(optimizer: DrafterOptimizer) -> dict[str, torch.Size]:
    """The shapes of `whole_moments`, as far as there are moments, without putting them together."""
    pieces = {
        each.name: (master.shape, torch.Size(each.shape))
        for each, master in zip(optimizer.assigned, optimizer.masters, strict=True)
    }
    found = {}
    for name, value in moments(optimizer).items():
        piece, whole = pieces[name.partition(SEPARATOR)[2]]
        found[name] = whole if value.shape == piece else value.shape
    return found


def give(optimizer: DrafterOptimizer) -> None:
    """What an owner does while another one takes `whole_moments`."""
    for _ in whole_moments(optimizer):
        pass


@torch.no_grad()
def load(optimizer: DrafterOptimizer, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Take over masters and moments, bit for bit; of a share, its pieces of them.

    Args:
        saved: whole moments.

    Raises:
        KeyError: a weight, or a moment of a parameter that has others, is missing.
    """
    shapes = {each.name: torch.Size(each.shape) for each in optimizer.assigned}
    numbers = {each.name: number for number, each in enumerate(optimizer.assigned)}
    for each, parameter, master in zip(
        optimizer.assigned, optimizer.parameters, optimizer.masters, strict=True
    ):
        if optimizer.share is not None:
            parameter.copy_(weights[each.name])
            continue  # the masters are pieces of it
        master.copy_(weights[each.name])
        if parameter is not master:
            parameter.copy_(master)
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.items():
        key, _, parameter_name = name.partition(SEPARATOR)
        if value.shape == shapes.get(parameter_name):
            value = optimizer.piece(numbers[parameter_name], value).detach().clone()
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
