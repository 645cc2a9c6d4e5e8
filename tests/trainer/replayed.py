"""What plays CUDA graphs on a CPU: it keeps its inputs as a graph does, and runs the function again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class Kept:
    """Inputs at fixed places, outputs that the next run overwrites."""

    def __init__(self, function: Callable[[list[Tensor]], list[Tensor]], inputs: Sequence[Tensor]) -> None:
        self.function, self.inputs = function, [each.clone() for each in inputs]
        self.outputs = function(self.inputs)  # warming up adds to gradients, as it does on a GPU

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new)
        return self.function(self.inputs)


class Stale(Kept):
    """One that does not take some of its new inputs."""

    places: tuple[int, ...] = ()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for place, (held, new) in enumerate(zip(self.inputs, inputs, strict=True)):
            if place not in self.places:
                held.copy_(new)
        return self.function(self.inputs)
