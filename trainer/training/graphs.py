"""A function of tensors that runs again as it was recorded, and what holds it to the function itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.errors import Refused

WARMUP = 2  # runs of a shape in which it may compile: the second meets gradients that are there already
# Relative; bfloat16 sums in another order differ by less, a graph that reads old data by more
GATE_ERROR = 0.02


class Replayable(Protocol):
    """A function of tensors that was recorded with some `inputs` and is run again with others."""

    def __init__(
        self, function: Callable[[list[Tensor]], list[Tensor]], inputs: Sequence[Tensor]
    ) -> None: ...
    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]: ...


class Graph:
    """A `Replayable` as a CUDA graph, on a stream of its own; captured by the main thread only.

    Outputs are copies: the next replay writes to the same place.
    """

    def __init__(self, function: Callable[[list[Tensor]], list[Tensor]], inputs: Sequence[Tensor]) -> None:
        self.inputs = [each.clone() for each in inputs]
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                function(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.outputs = function(self.inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return [each.clone() for each in self.outputs]


def hold(what: str, found: Tensor, wanted: Tensor) -> None:
    """Raises Refused: what a graph gave is not what was wanted."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))
    if not error <= GATE_ERROR:
        raise Refused(
            f"{what} of a replayed step is {error:.2g} off that of an eager one (at most {GATE_ERROR})",
            where="train.execution: captured",
            next="use execution: compiled",
        )
