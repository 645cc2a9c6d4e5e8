"""How the drafter's step is run: eager | compiled | captured. All three give the same sums and gradients.

    eager     operation by operation; what where_it_pays names is compiled on a GPU all the same
    compiled  the context's and the blocks' forward each as one compiled graph, backward with it
    captured  compiled, forward and backward of a micro-batch replayed as one CUDA graph, the optimizer's
              update as another (captured_update.py)

A graph replays addresses, not values, so everything that it reads is copied into tensors of its own, and
masks, labels and anchors are made inside. Nothing random is: anchors come from numbers that are drawn before.
Before a graph is used it is held to the eager step on other data than it was captured with. Only training
runs so; measuring has shapes of its own, and runs eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from trainer.data.packing import Rows
from trainer.errors import ConfigError, TrainerError
from trainer.model.drafter import Drafter
from trainer.model.gpu_kernels import why_none_here
from trainer.model.tapped_model import States
from trainer.training.captured_update import CapturedUpdates
from trainer.training.graphs import WARMUP, Graph, Replayable, hold
from trainer.training.loss import Sums
from trainer.training.optim import DrafterOptimizer

Run = Callable[[Any, Sequence[Tensor]], Sums]
"""(batch, uniforms) -> loss sums, gradients added to the parameters': `DrafterStep.gradients` as written."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for fixed shapes. No graphs of Inductor's own: they live by rules that ours would break."""
    return torch.compile(function, dynamic=False, fullgraph=True, options={"triton.cudagraphs": False})


class Execution:
    """One step's mode. `context` and `blocks` are what the step calls for the drafter's two halves."""

    def __init__(self, mode: str, drafter: Drafter, device_type: str) -> None:
        """Raises ConfigError: captured without a CUDA GPU, or nothing can be compiled for the one here."""
        if mode == "captured" and device_type != "cuda":
            raise ConfigError(
                f"captured needs a CUDA GPU, this runs on {device_type}",
                where="train.execution",
                next="use execution: compiled or eager",
            )
        reason = why_none_here() if mode != "eager" and device_type == "cuda" else None
        if reason is not None:
            raise ConfigError(
                f"{mode} cannot run: {reason}", where="train.execution", next="use execution: eager"
            )
        self.mode, self.drafter = mode, drafter
        self._context = self._blocks = None
        if mode != "eager":
            self._context, self._blocks = compiled(drafter.context_keys_values), compiled(drafter.forward)
        self._runs: Counter[tuple[object, ...]] = Counter()
        self._graphs: dict[tuple[object, ...], CapturedGradients] = {}
        self._updates = CapturedUpdates()

    @property
    def context(self) -> Callable[..., Any]:
        return (self._context if self.drafter.training else None) or self.drafter.context_keys_values

    @property
    def blocks(self) -> Callable[..., Any]:
        return (self._blocks if self.drafter.training else None) or self.drafter

    def gradients(self, run: Run, batch: Any, uniforms: Sequence[Tensor]) -> Sums:
        """`run`, in this mode.

        Raises:
            TrainerError: a shape that is known was compiled once more. Refused: a graph gives something else.
        """
        if self.mode == "eager" or not self.drafter.training:
            return run(batch, uniforms)
        shape = tuple(tuple(each.shape) for each in _inputs(batch, uniforms))
        if self.mode == "captured":
            if shape not in self._graphs:
                self._graphs[shape] = captured(run, self.drafter, batch, uniforms)
            return self._graphs[shape](batch, uniforms)
        before = counters["stats"]["unique_graphs"]
        sums = run(batch, uniforms)
        self._runs[shape] += 1
        again = counters["stats"]["unique_graphs"] - before
        if again and self._runs[shape] > WARMUP:
            raise TrainerError(
                f"{again} parts of the step were compiled again after {self._runs[shape] - 1} steps of the "
                "same shape: every step may cost that",
                where="train.execution: compiled",
                next="TORCH_LOGS=recompiles says why; execution: eager goes without",
            )
        return sums

    def update(self, optimizer: DrafterOptimizer, weight: Tensor) -> Tensor:
        """`optimizer.update`, in this mode. Raises Refused: a graph gives something else."""
        if self.mode == "captured" and optimizer.capturable:
            return self._updates(optimizer, weight)
        return optimizer.update(weight)


def _inputs(batch: Any, uniforms: Sequence[Tensor]) -> list[Tensor]:
    """All tensors that a micro-batch's gradients depend on, weights aside."""
    final = [] if batch.states.final is None else [batch.states.final]
    return [*batch.rows.parts(), batch.states.taps, *uniforms, *final]


def _from_inputs(inputs: Sequence[Tensor], like: Any) -> tuple[Any, list[Tensor]]:
    rows, taps, rest = Rows(*inputs[:4]), inputs[4], list(inputs[5:])
    final = None if like.states.final is None else rest.pop()
    return type(like)(rows, States(taps, final)), rest


class CapturedGradients:
    """`Run` by replay. The graph adds to gradients that it owns; they become the parameters' own."""

    def __init__(
        self,
        run: Run,
        drafter: Drafter,
        batch: Any,
        uniforms: Sequence[Tensor],
        replayable: type[Replayable],
    ) -> None:
        self.parameters = list(drafter.parameters())
        self.own = [torch.zeros_like(parameter) for parameter in self.parameters]

        def function(inputs: list[Tensor]) -> list[Tensor]:
            sums = run(*_from_inputs(inputs, batch))
            return [getattr(sums, name) for name in Sums.__dataclass_fields__]

        before = self._exchange(self.own)
        self.replay = replayable(function, _inputs(batch, uniforms))
        self._exchange(before)

    def _exchange(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return before

    def __call__(self, batch: Any, uniforms: Sequence[Tensor]) -> Sums:
        before = self._exchange(self.own)
        goes_on = all(there is own for there, own in zip(before, self.own, strict=True))
        if not goes_on:  # a step begins, or its gradients so far lie elsewhere
            torch._foreach_zero_(self.own)
        sums = Sums(*self.replay(_inputs(batch, uniforms)))
        if not goes_on:
            for parameter, there, own in zip(self.parameters, before, self.own, strict=True):
                if there is not None:
                    parameter.grad = there.add_(own)
        return sums


def captured(
    run: Run,
    drafter: Drafter,
    batch: Any,
    uniforms: Sequence[Tensor],
    replayable: type[Replayable] = Graph,
) -> CapturedGradients:
    """A micro-batch's gradients by replay, held to `run` on other data than it was captured with.

    Raises:
        Refused: with what differs and by how much.
    """
    made = CapturedGradients(run, drafter, batch, uniforms, replayable)
    kept = made._exchange([None] * len(made.parameters))
    taps, final = batch.states.taps, batch.states.final
    other = type(batch)(batch.rows, States(0.5 * taps.flip(1), None if final is None else final.flip(1)))
    drawn = [1 - uniform for uniform in uniforms]
    sums = run(other, drawn)
    wanted = made._exchange([None] * len(made.parameters))
    replayed = made(other, drawn)
    found = made._exchange(kept)
    for name in Sums.__dataclass_fields__:
        hold(f"the sum {name!r}", getattr(replayed, name), getattr(sums, name))
    for (name, _), mine, theirs in zip(drafter.named_parameters(), found, wanted, strict=True):
        assert mine is not None and theirs is not None
        hold(f"the gradient of {name}", mine, theirs)
    return made
