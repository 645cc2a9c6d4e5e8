"""One pass of the drafter over a batch of rows: blocks, mask, forward, loss sums. One definition for every
topology.

Nothing here reads a value back from the device or has a size that depends on the data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainer.data.batch import Batch
from trainer.data.packing import Rows
from trainer.errors import ConfigError
from trainer.machine import multiplies_bfloat16
from trainer.model.attention_spans import spans_of
from trainer.model.block_attention import why_not_here
from trainer.model.drafter import Drafter, KeyValue
from trainer.model.drafter_config import DrafterConfig
from trainer.model.flex import flex_mask
from trainer.model.gpu_kernels import why_none_here
from trainer.model.mask import Bounds, bounds, dense_mask
from trainer.model.shared_context import SharedContext
from trainer.sections import TrainConfig
from trainer.training.execution import Execution
from trainer.training.loss import Kind, Sums, head_loss
from trainer.training.objective import Blocks, choose_anchors, make_blocks
from trainer.training.twins import Twins


class Ends(Protocol):
    """All that a step needs of a target."""

    @property
    def device(self) -> torch.device: ...
    @property
    def embedding(self) -> nn.Module: ...
    @property
    def head_weight(self) -> Tensor: ...


class DrafterStep:
    """Loss sums and gradients of a batch, which add over micro-batches.

    `gradients` is what training does: a row's anchors in passes of a fixed width, all of them reading one
    context. `sums` is the plain definition, everything in one graph; both give the same.
    """

    def __init__(self, drafter: Drafter, target: Ends, config: TrainConfig, width: int) -> None:
        """
        Args:
            target: its two ends, on the drafter's device.
            width: anchors a row.
        """
        self.drafter, self.target, self.config, self.width = drafter, target, config, width
        # Passes of equal width; the last one's spare blocks are dead.
        self.pass_count = math.ceil(width / (config.objective.anchors_per_pass or width))
        self.pass_width = math.ceil(width / self.pass_count)
        self.device, self.device_type = target.device, target.device.type
        self.compute_dtype = products_dtype(config.precision, self.device_type)
        self.attention = attention_of(config.attention, self.device_type, self.compute_dtype, drafter.config)
        self.head = target.head_weight.to(self.compute_dtype)
        dpace = config.objective.dpace_alpha if config.objective.weighting == "dpace" else None
        self.kind = Kind(dpace, kl=config.objective.labels == "kl")
        self.execution = Execution(config.execution, drafter, self.device_type)
        self.windows = [drafter.config.window(layer) for layer in range(len(drafter.layers))]

    def blocks(self, rows: Rows, uniform: Tensor) -> Blocks:
        """The batch's blocks, a whole number of passes. uniform: [R, S] from `objective.draw`."""
        drafter, per_document = self.drafter.config, self.config.objective.anchors_per_document
        anchors, keep = choose_anchors(rows, uniform, per_document, self.width)
        spare = self.pass_count * self.pass_width - self.width
        anchors, keep = pad(anchors, (0, spare)), pad(keep, (0, spare))
        return make_blocks(rows, anchors, keep, drafter.block_size, self.config.gamma, drafter.mask_token_id)

    def masks(self, rows: Rows, blocks: Blocks) -> list[Any]:
        """One mask a layer; layers of one window share theirs."""
        config = self.drafter.config
        share = config.num_attention_heads // config.num_key_value_heads
        ways: dict[str, Callable[[Bounds], Any]] = {
            "dense": dense_mask,
            "flex": flex_mask,
            "triton": partial(spans_of, share=share),
        }
        build = ways[self.attention]
        made = {
            window: build(bounds(blocks.anchors, blocks.keep, rows.doc_start, config.block_size, window))
            for window in set(self.windows)
        }
        return [made[window] for window in self.windows]

    def passes(self, blocks: Blocks) -> Iterator[Blocks]:
        """The blocks, `pass_width` of each row at a time: neighbours along the row stay together."""
        for number in range(self.pass_count):
            yield blocks.part(slice(number * self.pass_width, (number + 1) * self.pass_width))

    @cached_property
    def twins(self) -> Twins:
        """Made for the first gradients: who only measures needs none."""
        return Twins(self.drafter, self.compute_dtype)

    def _precision(self) -> torch.autocast:
        low = self.compute_dtype != self.drafter.norm.weight.dtype
        return torch.autocast(self.device_type, self.compute_dtype, enabled=low)

    def context(self, batch: Batch, noise: Sequence[torch.Generator] | None = None) -> list[KeyValue]:
        """Each layer's keys and values of the batch's context.

        Args:
            noise: one for each row, on the step's device, to draw its input noise from; None: the device's.
        """
        taps = batch.states.taps
        if self.config.objective.input_noise and self.drafter.training:
            drawn = torch.empty_like(taps)
            for place, generator in enumerate(noise or [None] * len(drawn)):
                drawn[place].uniform_(generator=generator)
            taps = taps + (drawn * 2 - 1) * self.config.objective.input_noise
        with self._precision():
            return self.execution.context(taps.to(self.compute_dtype), batch.rows.positions)

    def hidden(self, batch: Batch, blocks: Blocks, context: Sequence[KeyValue] | None = None) -> Tensor:
        """The drafter's states of the mask slots, [R * N, B-1, H], as the head reads them.

        Args:
            context: from `context`; None: computed here.
        """
        config = self.drafter.config
        if context is None:
            context = self.context(batch)
        x = self.target.embedding(blocks.tokens).to(self.compute_dtype)
        with self._precision():
            out = self.execution.blocks(x, blocks.positions, context, self.masks(batch.rows, blocks))
        # Slot 0 is the anchor: nothing to foretell.
        slots = out.unflatten(1, (-1, config.block_size))[:, :, 1:]
        return slots.flatten(0, 1).to(self.compute_dtype)

    def sums(self, batch: Batch, uniform: Tensor, noise: Sequence[torch.Generator] | None = None) -> Sums:
        """Loss sums of one micro-batch in one graph. uniform, noise: see `blocks` and `context`."""
        return self._sums(batch, self.blocks(batch.rows, uniform), self.context(batch, noise))

    def supervised(self, host: Rows, uniforms: Sequence[Tensor]) -> list[list[int]] | None:
        """Supervised slots of each replay's passes, for the head to do no others; the device has no more.

        None: of no use, a captured step has one shape.

        Args:
            host, uniforms: of a micro-batch, on the CPU: nobody waits for the device.
        """
        if self.execution.mode == "captured":
            return None
        made = (self.blocks(host, uniform) for uniform in uniforms)
        return [[int(part.supervised.sum()) for part in self.passes(blocks)] for blocks in made]

    def _sums(
        self, batch: Batch, blocks: Blocks, context: Sequence[KeyValue], most: int | None = None
    ) -> Sums:
        hidden = self.hidden(batch, blocks, context)
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
            most,
        )

    def gradients(
        self,
        batch: Batch,
        uniforms: Sequence[Tensor],
        noises: Sequence[Sequence[torch.Generator]] | None = None,
        supervised: Sequence[Sequence[int]] | None = None,
    ) -> Sums:
        """Add the gradients of a micro-batch's replays to the drafter's; the loss sums, detached.

        Args:
            uniforms: one a replay, see `blocks`.
            noises: one a replay, see `context`. Noise differs from replay to replay, so with it the context
                is computed for each of them; without, once for all.
            supervised: see there; None: unknown, all slots go through the head.
        """
        run = partial(self._gradients, noises=noises, supervised=supervised)
        return self.execution.gradients(run, batch, uniforms)

    def _gradients(
        self,
        batch: Batch,
        uniforms: Sequence[Tensor],
        noises: Sequence[Sequence[torch.Generator]] | None = None,
        supervised: Sequence[Sequence[int]] | None = None,
    ) -> Sums:
        known: Iterator[int | None] = repeat(None)
        if supervised is not None:
            known = chain.from_iterable(supervised)
        total: Sums | None = None
        groups: list[tuple[Sequence[Tensor], Sequence[torch.Generator] | None]] = [(uniforms, None)]
        if noises is not None:
            groups = [([uniform], noise) for uniform, noise in zip(uniforms, noises, strict=True)]
        with self.twins.standing_in():
            for group, noise in groups:
                shared = SharedContext(self.context(batch, noise))
                for uniform in group:
                    for blocks in self.passes(self.blocks(batch.rows, uniform)):
                        sums = self._sums(batch, blocks, shared.leaves, next(known))
                        sums.loss.backward()
                        shared.gather()
                        self.twins.gather()
                        sums = dataclasses.replace(sums, loss=sums.loss.detach())
                        total = sums if total is None else total + sums
                shared.push()
                self.twins.gather()
        assert total is not None
        return total


def attention_of(wish: str, device_type: str, dtype: torch.dtype, drafter: DrafterConfig) -> str:
    """dense | flex | triton. Raises ConfigError: what is wished cannot be had here."""
    cuda = device_type == "cuda"
    none = why_none_here() if cuda else None
    reason = none or why_not_here(device_type, dtype, drafter.head_dim)
    if wish == "auto":
        return "dense" if none or not cuda else "flex" if reason else "triton"
    if wish == "flex" and none:
        raise ConfigError(
            f"flex attention cannot run: {none}", where="train.attention: flex", next="use attention: auto"
        )
    if wish == "triton" and reason:
        told = f"cannot run: {none}" if none else reason
        raise ConfigError(f"our kernels {told}", where="train.attention: triton", next="use attention: auto")
    return wish


def products_dtype(precision: str, device_type: str) -> torch.dtype:
    """The dtype of matrix products: bfloat16 where the hardware multiplies it, unless the recipe says
    otherwise.
    """
    if precision == "auto":
        return torch.bfloat16 if device_type == "cuda" or multiplies_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
