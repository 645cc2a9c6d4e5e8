"""The optimizer's update as a CUDA graph of its own.

It reads and writes weights, moments and gradients where they lay when it was captured, so it is used only
while they lie there; learning rates are filled in before. It is first held to the eager update with other
gradients, another weight and other rates, and then everything is put back.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from trainer.errors import Refused
from trainer.machine import available_memory
from trainer.training.graphs import WARMUP, Graph, Replayable, hold
from trainer.training.optim import DrafterOptimizer

SAMPLE = 1 << 16  # elements of each tensor that are compared
ROOM = 0.5  # of a device's free memory, for what is kept aside; the capture itself wants some, too

Places = tuple[int, ...]


class CapturedUpdates:
    """One graph for each set of places that comes again: the first steps with it are eager."""

    def __init__(self, replayable: type[Replayable] = Graph) -> None:
        self.replayable = replayable
        self._seen: Counter[Places] = Counter()
        self._graphs: dict[Places, Replayable] = {}

    def __call__(self, optimizer: DrafterOptimizer, weight: Tensor) -> Tensor:
        """`optimizer.update`, by replay where it can be. Raises Refused."""
        places = _places(optimizer)
        if places is None:
            return optimizer.update(weight)
        if places in self._graphs:
            norm = self._graphs[places]([weight])[0]
            torch.autograd.graph.increment_version(optimizer.parameters)  # a replay does not count
            return norm
        norm = optimizer.update(weight)
        self._seen[places] += 1
        if self._seen[places] > WARMUP:
            self._graphs[places] = captured_update(optimizer, weight, self.replayable)
        return norm


def _places(optimizer: DrafterOptimizer) -> Places | None:
    """Where all lies that an update touches; None: a gradient is not there, and lies elsewhere every time."""
    gradients = [each.grad for each in optimizer.parameters if each.grad is not None]
    if len(gradients) < len(optimizer.parameters):
        return None
    return tuple(each.data_ptr() for each in [*gradients, *optimizer.held().values()])


@torch.no_grad()
def captured_update(
    optimizer: DrafterOptimizer, weight: Tensor, replayable: type[Replayable] = Graph
) -> Replayable:
    """[weight] -> [norm] by replay. The gradients are used up; weights, moments and rates stay as they are.

    Raises:
        Refused: with what differs and by how much; or there is no room to keep what is there meanwhile.
    """
    held = optimizer.held()
    aside = place_aside(sum(each.nbytes for each in held.values()), weight.device)
    before = {name: each.to(aside, copy=True) for name, each in held.items()}

    def back() -> None:
        for name, each in held.items():
            each.copy_(before[name])

    def update(inputs: list[Tensor]) -> list[Tensor]:
        return [optimizer.update(inputs[0])]

    optimizer.set_rates(1.0)
    for parameter in optimizer.parameters:  # captured with bad gradients, for those change nothing
        assert parameter.grad is not None
        parameter.grad.fill_(torch.nan)
    made = replayable(update, [weight])
    inputs = [2 * weight + 1]
    _other_data(optimizer)
    wanted_norm, wanted = update(inputs)[0], _samples(held)
    back()
    _other_data(optimizer)
    found_norm, found = made(inputs)[0], _samples(held)
    back()
    hold("the gradient's norm", found_norm, wanted_norm)
    was = _samples(before)
    for name in held:
        old = was[name].to(found[name].device)
        hold(f"the change of {name}", found[name] - old, wanted[name] - old)
    return made


def place_aside(size: int, device: torch.device) -> torch.device:
    """Where so many bytes are kept for a moment: on the device if they leave half of its room, else the host.

    Raises:
        Refused: neither has room; the kernel would end the process without a word.
    """
    if device.type == "cuda" and size <= ROOM * free_memory(device):
        return device
    available = available_memory()
    if available is not None and size > available:
        raise Refused(
            f"{size / 2**30:.2f} GiB are needed for weights and moments while the update is captured; "
            f"{available / 2**30:.2f} GiB of memory are available",
            where="train.execution: captured",
            next="use execution: compiled, or a machine or container with more memory",
        )
    return torch.device("cpu")


def free_memory(device: torch.device) -> int:
    """Bytes that torch can still give out on a GPU: what is free there, and what it holds unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _other_data(optimizer: DrafterOptimizer) -> None:
    """Gradients and rates as no step has them. No generator of torch's own is drawn from."""
    optimizer.set_rates(0.5)
    for number, parameter in enumerate(optimizer.parameters):
        assert parameter.grad is not None
        generator = torch.Generator(parameter.device).manual_seed(number)
        parameter.grad.normal_(generator=generator)


def _samples(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some elements of each, from all over it, in float32 or more."""
    return {
        name: each.detach().flatten()[:: max(1, each.numel() // SAMPLE)].to(torch.float32, copy=True)
        for name, each in tensors.items()
    }
