"""Steps with a non-finite gradient: counted where it is, read by the host when the count has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.culprits import Culprits, Who, named, rank_of
from trainer.errors import TrainerError


class BadSteps:
    """Counts the steps with a non-finite gradient, and ends a run that has too many in a row.

    On a GPU the host reads each count when it has arrived, at most LAG steps later, and never waits for the
    step that was just begun.
    """

    LAG = 2

    def __init__(self, most: int, total: int = 0, in_a_row: int = 0) -> None:
        """
        Args:
            most: in a row; the next one ends the run.
            total, in_a_row: of a run that goes on, when it was saved.
        """
        self.most, self.total, self.in_a_row = most, total, in_a_row
        self._before = in_a_row
        self._row: Tensor | None = None  # [1 + W] bad steps in a row; how many of them were each worker's
        self._who: Sequence[Who] = ()
        self._sent: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def saw(self, step: int, norm: Tensor, culprits: Culprits | None = None) -> None:
        """Step `step` had this gradient norm. Raises TrainerError, for it or for one shortly before.

        Args:
            culprits: whose gradients were not finite by themselves; None: nobody else adds to them.
        """
        bad = (~norm.isfinite()).to(torch.int32).reshape(1)
        counts = bad
        if culprits is not None:
            self._who = culprits.who
            counts = torch.cat([bad, culprits.bad.to(bad.device, torch.int32)])
        if self._row is None:
            self._row = torch.zeros_like(counts)
            self._row[0] += self._before
        self._row = (self._row + counts) * bad
        self._sent.append((step, *_to_host(self._row)))
        while self._sent and (len(self._sent) > self.LAG or _arrived(self._sent[0][2])):
            self._read()

    def finish(self) -> None:
        """Read all that is on its way. Raises TrainerError."""
        while self._sent:
            self._read()

    def _read(self) -> None:
        step, count, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        self.in_a_row, *of_each = count.tolist()
        self.total += self.in_a_row > 0
        if self.in_a_row > self.most:
            counts = {who: number for who, number in zip(self._who, of_each, strict=True) if number}
            raise TrainerError(
                f"the gradient of {self.in_a_row} steps in a row is not finite, the last of them step "
                f"{step + 1}; none of them changed anything{self._whose(counts)}",
                where="training",
                next="lower optimizer.lr, or start from the last checkpoint",
                rank=rank_of(counts),
            )

    def _whose(self, counts: Mapping[Who, int]) -> str:
        if not self._who:
            return ""
        if not counts:
            return "; each one's own was finite, the sum of them was not"
        return f"; not finite already before they were added up, by number of steps: {named(counts)}"


def _to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy that is on its way to the host, and the event that says that it is there; None: it is."""
    if not tensor.is_cuda:
        return tensor, None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, event


def _arrived(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()
