"""What a step reads: rows, and the target's states of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.packing import Rows
from trainer.model.tapped_model import States


@dataclass(frozen=True)
class Batch:
    """Rows and the target's states of them, all finite.

    `host`: the rows as they were before they went to the device, where some may have become unsupervised
    since; None: unknown.
    """

    rows: Rows
    states: States
    host: Rows | None = None

    def part(self, rows: slice) -> Batch:
        final = self.states.final
        states = States(self.states.taps[rows], None if final is None else final[rows])
        return Batch(self.rows[rows], states, None if self.host is None else self.host[rows])

    def to(self, device: torch.device) -> Batch:
        final = self.states.final
        states = States(self.states.taps.to(device), None if final is None else final.to(device))
        return Batch(self.rows.to(device), states, self.host)


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
