"""A step's gradients, whoever computes them. What a row of a batch adds to them depends on seed, step and the
row's place in the batch alone, so every division of the rows gives the same sums, up to the order of adding.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.culprits import Culprits, Who
from trainer.data.batch import Batch
from trainer.sections import TrainConfig
from trainer.training.loss import Sums
from trainer.training.objective import draw
from trainer.training.step import DrafterStep


class Bad(NamedTuple):
    """Which rows of a batch had non-finite states."""

    rows: Tensor  # indices into the data
    flags: Tensor
    makers: Sequence[Who] = ()  # of each row's states, where there are several


class Work(Protocol):
    """Who does a step's forward and backward passes."""

    def gradients(self, number: int) -> tuple[Sums, Bad | None]:
        """Leave the gradient sums of step `number`'s whole batch in the drafter's `.grad`; the loss sums."""

    def culprits(self) -> Culprits | None:
        """Whose gradients were not finite in the latest step; None: one works alone, or no step yet."""

    def updated(self) -> None:
        """The drafter has new weights: copies take them."""

    def depths(self) -> dict[str, int]:
        """Queue depths for the heartbeat, by name."""

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, nobody else uses the target and the drafter of the main thread."""

    def close(self) -> None:
        """End what was started."""


def row_gradients(step: DrafterStep, config: TrainConfig, batch: Batch, number: int, rows: slice) -> Sums:
    """Add the gradients of some rows of a step's batch to the drafter's.

    Args:
        batch: those rows alone, on the step's device.
        number: the step, from 0.
        rows: their places in the step's whole batch.
    """
    size = config.micro_rows or config.batch_rows
    replays, shape = range(config.objective.replays), (config.batch_rows, config.data.row_tokens)
    device = batch.states.taps.device
    drawn = [draw(shape, config.seed, number, replay)[rows] for replay in replays]
    uniforms = [uniform.to(device) for uniform in drawn]
    total: Sums | None = None
    for start in range(0, len(batch.rows), size):
        part = slice(start, start + size)
        noises = None
        if config.objective.input_noise:
            places = range(rows.start + start, rows.start + min(start + size, len(batch.rows)))
            noises = [
                [_generator(step.device, config.seed, number, replay, place) for place in places]
                for replay in replays
            ]
        here = batch.part(part)
        supervised = None
        if here.host is not None:
            supervised = step.supervised(here.host, [uniform[part] for uniform in drawn])
        sums = step.gradients(here, [uniform[part] for uniform in uniforms], noises, supervised)
        total = sums if total is None else total + sums
    assert total is not None
    return total


def _generator(device: torch.device, *numbers: int) -> torch.Generator:
    """A generator of its own for one row's noise."""
    key = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)


def not_finite(gradients: Sequence[Tensor], loss: Tensor) -> Tensor:
    """Whether any gradient or the loss is not finite, on the loss's device; nothing is read back."""
    worst = [loss.detach().abs(), *torch._foreach_norm(list(gradients), math.inf)]
    return ~torch.stack([each.to(loss.device, torch.float32).reshape(()) for each in worst]).isfinite().all()


def shares(rows: int, workers: int) -> list[slice]:
    """The batch's rows over workers, as even as can be; some are empty when there are more workers."""
    edges = [rows * worker // workers for worker in range(workers + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]
