"""Before the first step, with the run's own first batch: self-check, disk, memory. Refuses early, with the
number that fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import files as checkpoint
from trainer.checkpoint.optimizer_state import forget, moments, whole_shapes
from trainer.checkpoint.writer import HostCopies, Writer
from trainer.data.bad_rows import newly_bad
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset
from trainer.data.packing import Rows
from trainer.errors import DataError
from trainer.model.ends import is_whole
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.run import preflight
from trainer.run.selfcheck import check, check_taps
from trainer.run.setup import Assembled
from trainer.sections import TrainConfig
from trainer.training.objective import draw
from trainer.training.optim import DrafterOptimizer
from trainer.training.step import DrafterStep
from trainer.words import plural

Order = Callable[[int, int], Tensor]
TRIES = 8  # batches among which the self-check looks for one with something to train on


def prepare(
    config: TrainConfig,
    parts: Assembled,
    data: Dataset,
    order: Order,
    step: DrafterStep,
    optimizer: DrafterOptimizer,
    writer: Writer,
    say: Callable[[str], None],
) -> None:
    """Check everything. Leaves weights, moments and generators as they were.

    Raises:
        Refused: with the figure that fails. DataError: the data has too many bad rows.
    """
    saves = writer.copies is not None
    preflight.check_host_memory(optimizer, parts.target.device.type == "cpu", saves)
    say(preflight.check_disk(writer.root, config.checkpoint.keep, preflight.checkpoint_bytes(optimizer)))
    batch, uniform = first_batch(config, data, order, parts.target)
    size = config.micro_rows or config.batch_rows
    batch, uniform = batch.part(slice(0, size)), uniform[:size]
    whole = parts.target if is_whole(parts.target) else None
    anchors = plural(step.pass_width, "anchor")
    shape = f"{plural(size, 'row')} of {config.data.row_tokens} tokens with {anchors} each"
    with preflight.kernels_wanted():
        say(str(check(step, whole, batch, uniform)))
        with preflight.worst_case(shape):
            rehearse(step, optimizer, writer.copies, batch, uniform)
    say(preflight.peak(parts.target.device))


def first_batch(config: TrainConfig, data: Dataset, order: Order, target: Target) -> tuple[Batch, Tensor]:
    """The first batch that has something to train on, with its numbers for drawing anchors."""
    bad_rows: list[int] = []
    size = config.micro_rows or config.batch_rows
    for number in range(TRIES):
        index = order(number, config.batch_rows)
        if data.states is None and not is_whole(target):
            batch, bad = stand_in(data.rows[index].to(target.device), target, data.full), None
        else:
            batch, bad = data.batch(index, target)
        if bool(batch.rows[slice(0, size)].supervised.any()):
            uniform = draw((config.batch_rows, config.data.row_tokens), config.seed, number, 0)
            return batch, uniform.to(target.device)
        if bad is not None:
            found = index[bad.cpu()].tolist()
            bad_rows += newly_bad(found, bad_rows, config.data.max_bad_rows, len(data.rows))
    raise DataError("nothing to train on in the first batches", where="train.data", next="check the data")


def stand_in(rows: Rows, target: Target, full: bool) -> Batch:
    """Rows with random hidden states, where none can be made: their shapes and number formats are right."""
    hidden, size = target.hidden_size, rows.tokens.shape
    generator = torch.Generator(target.device).manual_seed(0)
    given: dict[str, Any] = {"dtype": target.dtype, "device": target.device, "generator": generator}
    taps = torch.randn(*size, len(target.taps) * hidden, **given)
    return Batch(rows, States(taps, torch.randn(*size, hidden, **given) if full else None))


def check_target(config: TrainConfig, target: Target, data: Dataset, order: Order) -> None:
    """A target that makes states for others holds its taps to the self-check's rule. Raises as `prepare`."""
    if data.states is None:
        batch, _ = first_batch(config, data, order, target)
        check_taps(target, batch.rows, batch.states)


def rehearse(
    step: DrafterStep,
    optimizer: DrafterOptimizer,
    copies: HostCopies | None,
    batch: Batch,
    uniform: Tensor,
) -> None:
    """A whole step with every token trained on, and room for the copies that checkpoints are written from
    (None: another rank's); then all is as it was.
    """
    drafter = step.drafter.train()
    rows = dataclasses.replace(batch.rows, supervised=torch.ones_like(batch.rows.supervised))
    before = checkpoint.take(0, drafter, optimizer, {}, keep=copies or checkpoint.to_host)
    if copies is not None:
        copies.wait()
    replays = step.config.objective.replays  # as training will: a graph is captured for that number
    sums = step.gradients(Batch(rows, batch.states), [uniform] * replays)
    optimizer.step(0.0, sums.weight)
    if copies is not None:
        shapes = whole_shapes(optimizer)
        for name, tensor in moments(optimizer).items():
            copies.reserve(name, shapes[name], tensor).zero_()  # else the memory is only promised
    forget(optimizer, before.weights)
    checkpoint.restore_generators(before.state)
