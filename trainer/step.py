"""One pass of the drafter over a batch of rows: blocks, mask, forward, loss sums. One definition for every
topology.

Nothing here reads a value back from the device or has a size that depends on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.config import TrainConfig
from trainer.data.packing import Rows
from trainer.loss import Kind, Sums, head_loss
from trainer.machine import multiplies_bfloat16
from trainer.model.drafter import Drafter
from trainer.model.flex import flex_mask
from trainer.model.mask import bounds, dense_mask
from trainer.model.target import States
from trainer.objective import Blocks, choose_anchors, make_blocks


@dataclass(frozen=True)
class Batch:
    """Rows and the target's states of them, all finite."""

    rows: Rows
    states: States

    def part(self, rows: slice) -> Batch:
        final = self.states.final
        return Batch(self.rows[rows], States(self.states.taps[rows], None if final is None else final[rows]))

    def to(self, device: torch.device) -> Batch:
        final = self.states.final
        states = States(self.states.taps.to(device), None if final is None else final.to(device))
        return Batch(self.rows.to(device), states)


def without_bad_rows(rows: Rows, states: States) -> tuple[Batch, Tensor]:
    """Leave rows with non-finite states without anchors, and their states zero: a NaN spreads even under a
    mask.
    """
    finite = states.taps.isfinite().flatten(1).all(1)
    if states.final is not None:
        finite = finite & states.final.isfinite().flatten(1).all(1)
    rows = Rows(rows.tokens, rows.documents, rows.positions, rows.supervised & finite[:, None])
    keep = finite[:, None, None]
    final = torch.where(keep, states.final, 0) if states.final is not None else None
    return Batch(rows, States(torch.where(keep, states.taps, 0), final)), ~finite


class Ends(Protocol):
    """All that a step needs of a target."""

    @property
    def device(self) -> torch.device: ...
    @property
    def embedding(self) -> nn.Module: ...
    @property
    def head_weight(self) -> Tensor: ...


class DrafterStep:
    """Loss sums of a batch; `backward` on their loss gives gradients that add over micro-batches."""

    def __init__(self, drafter: Drafter, target: Ends, config: TrainConfig, width: int) -> None:
        """
        Args:
            target: its two ends, on the drafter's device.
            width: anchors a row.
        """
        self.drafter, self.target, self.config, self.width = drafter, target, config, width
        self.device, self.device_type = target.device, target.device.type
        self.flex = config.attention == "flex" or (config.attention == "auto" and self.device_type == "cuda")
        self.compute_dtype = products_dtype(config.precision, self.device_type)
        self.head = target.head_weight.to(self.compute_dtype)
        dpace = config.objective.dpace_alpha if config.objective.weighting == "dpace" else None
        self.kind = Kind(dpace, kl=config.objective.labels == "kl")
        self.windows = [drafter.config.window(layer) for layer in range(len(drafter.layers))]

    def blocks(self, rows: Rows, uniform: Tensor) -> Blocks:
        """The batch's blocks. uniform: [R, S] from `trainer.objective.draw`."""
        drafter, objective = self.drafter.config, self.config.objective
        anchors, keep = choose_anchors(rows, uniform, objective.anchors_per_document, self.width)
        gamma = self.config.gamma if objective.weighting == "decay" else float("inf")
        return make_blocks(rows, anchors, keep, drafter.block_size, gamma, drafter.mask_token_id)

    def masks(self, rows: Rows, blocks: Blocks) -> list[Any]:
        """One mask a layer; layers of one window share theirs."""
        size, build = self.drafter.config.block_size, flex_mask if self.flex else dense_mask
        made = {
            window: build(bounds(blocks.anchors, blocks.keep, rows.doc_start, size, window))
            for window in set(self.windows)
        }
        return [made[window] for window in self.windows]

    def hidden(self, batch: Batch, blocks: Blocks, noise: Sequence[torch.Generator] | None = None) -> Tensor:
        """The drafter's states of the mask slots, [R * N, B-1, H], as the head reads them.

        Args:
            noise: one for each row, on the step's device, to draw its input noise from; None: the device's.
        """
        config = self.drafter.config
        taps = batch.states.taps
        if self.config.objective.input_noise and self.drafter.training:
            drawn = torch.empty_like(taps)
            for place, generator in enumerate(noise or [None] * len(drawn)):
                drawn[place].uniform_(generator=generator)
            taps = taps + (drawn * 2 - 1) * self.config.objective.input_noise
        low = self.compute_dtype != self.drafter.fc.weight.dtype
        taps = taps.to(self.compute_dtype if low else self.drafter.fc.weight.dtype)
        with torch.autocast(self.device_type, self.compute_dtype, enabled=low):
            context = self.drafter.context_keys_values(taps, batch.rows.positions)
            x = self.target.embedding(blocks.tokens).to(self.drafter.fc.weight.dtype)
            out = self.drafter(x, blocks.positions, context, self.masks(batch.rows, blocks))
        slots = out.unflatten(1, (-1, config.block_size))[
            :, :, 1:
        ]  # slot 0 is the anchor: nothing to foretell
        return slots.flatten(0, 1).to(self.compute_dtype)

    def sums(self, batch: Batch, uniform: Tensor, noise: Sequence[torch.Generator] | None = None) -> Sums:
        """Loss sums of one micro-batch. uniform, noise: see `blocks` and `hidden`."""
        blocks = self.blocks(batch.rows, uniform)
        hidden = self.hidden(batch, blocks, noise)
        teacher = None
        if self.config.objective.labels != "data":
            assert batch.states.final is not None
            # The token at anchor + k is foretold by the target's state at anchor + k - 1.
            index = (blocks.label_index - 1).clamp(min=0).flatten(1)[:, :, None]
            final = batch.states.final.gather(1, index.expand(-1, -1, batch.states.final.shape[-1]))
            teacher = final.view(*hidden.shape).to(self.compute_dtype)
        return head_loss(
            hidden,
            self.head,
            blocks.labels.flatten(0, 1),
            blocks.weights.flatten(0, 1),
            blocks.supervised.flatten(0, 1),
            self.kind,
            teacher,
            self.config.objective.loss_chunk,
        )


def products_dtype(precision: str, device_type: str) -> torch.dtype:
    """The dtype of matrix products: bfloat16 where the hardware multiplies it, unless the recipe says
    otherwise.
    """
    if precision == "auto":
        return torch.bfloat16 if device_type == "cuda" or multiplies_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
