"""The split topology: target processes make hidden states, drafter processes learn from them.

    target t  -- states of a share of rows -->  slot of drafter d  -->  gradients, added up over the drafters

Drafters are the first ranks, so the first rank measures, saves and reports as everywhere; targets follow. Who
makes what for whom: link.py. Where states lie: slots.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.culprits import Culprits
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset
from trainer.data.packing import Rows
from trainer.errors import TrainerError
from trainer.machine import peaks
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.process.runfiles import RunFiles
from trainer.sections import TrainConfig
from trainer.topology import slots as memory
from trainer.topology.colocated import Reduction
from trainer.topology.launcher import DOOR, rank_folder
from trainer.topology.link import Door, Line, knock, maker
from trainer.topology.ranks import Ranks
from trainer.topology.together import LONG_S
from trainer.topology.work import Bad, row_gradients, shares
from trainer.training.loss import Sums
from trainer.training.step import DrafterStep

Order = Callable[[int, int], Tensor]
GIB = 2.0**30
TESTED_BYTES = 16 * 2**20
"""A smaller slot's rate says how long a call takes, not how fast the link is."""


class SplitDrafter:
    """`Work` of one drafter process."""

    def __init__(
        self,
        config: TrainConfig,
        files: RunFiles,
        say: Callable[[str], None],
        step: DrafterStep,
        target: Target,
        data: Dataset,
        order: Order,
        drafters: Ranks,
        first: int,
    ) -> None:
        """
        Args:
            target: for the shape of its states.
            drafters: the group of the drafters alone.
            first: the first step of this life of the run.
        """
        self.config, self.files, self.step = config, files, step
        self.data, self.order, self.rank = data, order, drafters.rank
        self.rows = shares(config.batch_rows, drafters.size)[drafters.rank]
        self.count = config.layout.queue + 1  # one is being read
        self.reduction = Reduction(list(step.drafter.parameters()), drafters)
        shape = _shape(config, target, data, self.rows)
        owned = memory.make(shape, self.count, step.device)
        self.slots = owned.slots
        self.filled: dict[int, tuple[list[bool] | None, float]] = {}
        self.rates: dict[int, float] = {}
        door = Door(rank_folder(files.folder, self.rank) / DOOR)
        peers = door.accept(config.layout.targets, files.beat, LONG_S)
        self.line = Line(peers, "target", files.beat)
        for peer in range(len(peers)):  # one after the other: each writes its test into the same slot
            self.line.tell(peer, "slots", owned.ticket)
            self.line.hear(self._heard, partial(self._opened_by, peer), LONG_S, "slots to be opened")
        owned.opened_by_all()
        self.line.tell_all("taken", first - 1)
        slowest = min(self.rates.values())
        say(
            f"split: {config.layout.targets} target, {drafters.size} drafter; {self.count} slots of "
            f"{shape.bytes / GIB:.2f} GiB a drafter, written at {slowest / GIB:.2f} GiB/s or more"
        )
        _check_floor(slowest, shape, config.layout.floor_gib_s)

    def _heard(self, peer: int, message: tuple[Any, ...]) -> None:
        if message[0] == "open":
            _, rate, wanted = message
            _check_sum(0, wanted, self.slots[0])
            self.rates[peer] = rate
            return
        _, number, bad, checksum = message
        self.filled[number] = bad, checksum

    def _opened_by(self, peer: int) -> bool:
        return peer in self.rates

    def gradients(self, number: int) -> tuple[Sums, Bad | None]:
        """See `Work`. Raises PeerLost."""
        wait_s = self.config.layout.wait_s
        with self.files.waiting("hidden states"):
            ready = f"hidden states of step {number}"
            self.line.hear(self._heard, lambda: number in self.filled, wait_s, ready)
        bad, checksum = self.filled.pop(number)
        taps, final = self.slots[number % self.count]
        _check_sum(number, checksum, (taps, final))
        index = self.order(number, self.config.batch_rows)
        host = self.data.rows[index[self.rows]]
        rows = host.to(self.step.device)
        if bad is not None and any(bad):
            keep = ~torch.tensor(bad, device=self.step.device)
            rows = Rows(rows.tokens, rows.documents, rows.positions, rows.supervised & keep[:, None])
        batch = Batch(rows, States(taps, final), host)
        sums = row_gradients(self.step, self.config, batch, number, self.rows)
        if self.step.device.type == "cuda":
            torch.cuda.synchronize()  # the slot has been read
        following = maker(number + self.count, self.rank, self.reduction.ranks.size, len(self.line.peers))
        self.line.tell(following, "taken", number)
        flags = None
        if bad is not None:
            flags = torch.zeros(len(index), dtype=torch.bool)
            flags[self.rows] = torch.tensor(bad)
            flags = flags.to(self.step.device)
        sums, flags = self.reduction(sums, flags, number)
        return sums, None if flags is None else Bad(index, flags, self._makers(number))

    def _makers(self, number: int) -> list[int]:
        """The rank that made each row's states in step `number`."""
        size, targets = self.reduction.ranks.size, len(self.line.peers)
        parts = shares(self.config.batch_rows, size)
        ranks = [size + maker(number, drafter, size, targets) for drafter in range(size)]
        return [rank for rank, part in zip(ranks, parts, strict=True) for _ in range(part.start, part.stop)]

    def culprits(self) -> Culprits | None:
        """See `Work`."""
        return self.reduction.culprits

    def updated(self) -> None:
        """See `Work`: the same step everywhere."""

    def depths(self) -> dict[str, int]:
        """See `Work`."""
        return {"hidden states": len(self.filled)}

    def quiet(self) -> AbstractContextManager[None]:
        """See `Work`: this process's target is nobody else's."""
        return nullcontext()

    def close(self) -> None:
        """See `Work`. The targets leave when every drafter has said that it ends."""
        try:
            self.line.tell_all("end")
        except TrainerError:
            pass  # a target is gone: that is told elsewhere
        self.line.close()


def serve(
    config: TrainConfig,
    files: RunFiles,
    target: Target,
    data: Dataset,
    order: Order,
    mine: int,
    first: int,
) -> None:
    """Be target `mine` until every drafter has ended. Raises PeerLost."""
    layout, count = config.layout, config.layout.queue + 1
    parts = shares(config.batch_rows, layout.drafters)
    peers = [
        knock(rank_folder(files.folder, drafter) / DOOR, mine, files.beat, LONG_S)
        for drafter in range(layout.drafters)
    ]
    line = Line(peers, "drafter", files.beat)
    opened: dict[int, memory.Slots] = {}
    taken = [-math.inf] * layout.drafters  # until they say that all may write

    def heard(peer: int, message: tuple[Any, ...]) -> None:
        if message[0] == "slots":
            opened[peer] = memory.opened(message[1])
            line.tell(peer, "open", *_test_write(opened[peer], mine))
        else:
            taken[peer] = message[1]

    line.hear(heard, lambda: len(opened) == layout.drafters, LONG_S, "slots")
    number = first
    while not line.all_ended:
        for drafter, rows in enumerate(parts):
            if maker(number, drafter, layout.drafters, layout.targets) != mine:
                continue

            def free(drafter: int = drafter) -> bool:
                return line.all_ended or taken[drafter] >= number - count  # noqa: B023

            # Long: the drafters may be measuring. If they hang, their own heartbeats say so.
            with files.waiting("room"):
                line.hear(heard, free, LONG_S, f"room for step {number}")
            if line.all_ended:
                break
            index = order(number, config.batch_rows)[rows]
            batch, bad = data.batch(index, target)
            _copy(opened[drafter], number % count, batch.states)
            checksum = memory.checksum((batch.states.taps, batch.states.final))
            line.tell(drafter, "filled", number, None if bad is None else bad.tolist(), checksum)
        number += 1
        files.peaks = peaks()
        files.stepped(number)
    line.close()


def _shape(config: TrainConfig, target: Target, data: Dataset, rows: slice) -> memory.Shape:
    hidden = target.hidden_size
    dtype = target.dtype if data.states is None else data.states.taps.dtype
    return memory.Shape(
        rows.stop - rows.start,
        config.data.row_tokens,
        len(target.taps) * hidden,
        hidden if data.full else 0,
        dtype,
    )


def _copy(slots: memory.Slots, slot: int, states: States) -> None:
    """Copy states into a slot, all of it there on return."""
    taps, final = slots[slot]
    taps.copy_(states.taps)
    if final is not None and states.final is not None:
        final.copy_(states.final)
    if taps.is_cuda:
        torch.cuda.synchronize()


def _test_write(slots: memory.Slots, mine: int) -> tuple[float, float]:
    """Fill slot 0 as states would: bytes a second, and the checksum of what was written."""
    device = torch.device("cuda", torch.cuda.current_device()) if slots.memory.is_cuda else "cpu"
    shape = slots.shape
    flat = torch.full((shape.elements,), 1.0 + mine % 7, dtype=shape.dtype, device=device)
    states = States(*shape.views(flat))
    _copy(slots, 0, states)
    began = time.perf_counter()
    _copy(slots, 0, states)
    seconds = max(1e-9, time.perf_counter() - began)
    return shape.bytes / seconds, memory.checksum((states.taps, states.final))


def _check_floor(bytes_s: float, shape: memory.Shape, floor_gib_s: float) -> None:
    if shape.bytes >= TESTED_BYTES and bytes_s < floor_gib_s * GIB:
        raise TrainerError(
            f"hidden states travel at {bytes_s / GIB:.3f} GiB/s, less than {floor_gib_s:g} GiB/s",
            where="train.layout.floor_gib_s",
            next="look for a process on these GPUs or a slow link (nvidia-smi topo -m), or lower the floor",
        )


def _check_sum(number: int, wanted: float, read: tuple[Tensor, Tensor | None]) -> None:
    found = memory.checksum(read)
    if found != wanted and not (found != found and wanted != wanted):
        raise TrainerError(
            f"step {number}: hidden states arrived damaged (checksum {found}, written {wanted})",
            where="topology split",
            next="run with topology colocated, and have the GPUs' links checked",
        )
