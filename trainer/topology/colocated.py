"""The colocated topology: each rank runs target and drafter on its share of every batch's rows; the sums of
gradients are added up, and every rank takes the same optimizer step. One process alone has all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trainer.culprits import Culprits
from trainer.data.dataset import Dataset
from trainer.model.target import Target
from trainer.sections import TrainConfig
from trainer.topology.ranks import Ranks
from trainer.topology.work import Bad, not_finite, row_gradients, shares
from trainer.training.loss import Sums
from trainer.training.optim import DrafterOptimizer
from trainer.training.step import DrafterStep


class Colocated:
    """`Work` of one rank. With `ranks` None it is the whole batch's, alone."""

    def __init__(
        self,
        config: TrainConfig,
        step: DrafterStep,
        target: Target,
        data: Dataset,
        order: Callable[[int, int], Tensor],
        ranks: Ranks | None = None,
        optimizer: DrafterOptimizer | None = None,
    ) -> None:
        """optimizer: whose state is shared out over the ranks; None: each has all of it."""
        self.config, self.step, self.target = config, step, target
        self.data, self.order, self.ranks = data, order, ranks
        size, rank = (ranks.size, ranks.rank) if ranks else (1, 0)
        parts = shares(config.batch_rows, size)
        self.rows = parts[rank]
        self.makers = [each for each, part in enumerate(parts) for _ in range(part.stop - part.start)]
        self.reduction = Reduction(list(step.drafter.parameters()), ranks, optimizer) if ranks else None

    def gradients(self, number: int) -> tuple[Sums, Bad | None]:
        """See `Work`. Raises PeerLost."""
        index = self.order(number, self.config.batch_rows)
        batch, bad = self.data.batch(index[self.rows], self.target)
        sums = row_gradients(self.step, self.config, batch, number, self.rows)
        if self.reduction is not None:
            flags = None
            if bad is not None:
                flags = torch.zeros(len(index), dtype=torch.bool, device=bad.device)
                flags[self.rows] = bad
            sums, bad = self.reduction(sums, flags, number)
        return sums, None if bad is None else Bad(index, bad, self.makers)

    def culprits(self) -> Culprits | None:
        """See `Work`."""
        return self.reduction.culprits if self.reduction is not None else None

    def updated(self) -> None:
        """See `Work`: the same step everywhere, or each rank's share of it, which are put together."""
        if self.reduction is not None:
            self.reduction.updated()

    def depths(self) -> dict[str, int]:
        """See `Work`: nothing waits."""
        return {}

    def quiet(self) -> AbstractContextManager[None]:
        """See `Work`: there is nobody else."""
        return nullcontext()

    def close(self) -> None:
        """See `Work`: nothing was started."""


class Reduction:
    """Add gradients, loss sums and bad-row flags over the ranks: one flat buffer of gradients, made once, and
    one of everything else. Nothing is divided here: the optimizer divides by the global weight.

    Where the optimizer is shared out, each rank gets the sums of its share alone; between two steps the
    buffer carries what each rank owns to all others. This is then the optimizer's `Owners`.
    """

    def __init__(
        self, parameters: list[Tensor], ranks: Ranks, optimizer: DrafterOptimizer | None = None
    ) -> None:
        self.parameters, self.ranks, self.optimizer = parameters, ranks, optimizer
        first = parameters[0]
        counts = [each.numel() for each in parameters]
        spare = -sum(counts) % ranks.size
        self.flat = torch.zeros(sum(counts) + spare, dtype=first.dtype, device=first.device)
        parts = self.flat.split([*counts, spare])
        self.views = [part.view_as(each) for part, each in zip(parts, parameters, strict=False)]
        self.culprits: Culprits | None = None  # of the latest step
        if optimizer is not None:
            optimizer.owners = self

    def add(self, value: Tensor) -> None:
        """See `Owners`."""
        self.ranks.add(value, "the gradient's norm")

    @torch.no_grad()
    def whole(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """See `Owners`."""
        assert self.optimizer is not None
        for view, cut, piece in zip(self.views, self.optimizer.cuts, pieces, strict=True):
            view.view(-1)[cut].copy_(piece)
        self.ranks.gather(self.flat, what)
        return self.views

    @torch.no_grad()
    def updated(self) -> None:
        """Every rank's new weights to all."""
        if self.optimizer is not None:
            torch._foreach_copy_(self.parameters, self.whole(self.optimizer.masters, "new weights"))

    @torch.no_grad()
    def __call__(self, sums: Sums, flags: Tensor | None, number: int) -> tuple[Sums, Tensor | None]:
        """The sums over all ranks; the parameters' gradients become views of the flat buffer. Of those, only
        this rank's share are sums where the optimizer is shared out.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view
        mine = torch.zeros(self.ranks.size, dtype=torch.float64, device=self.flat.device)
        mine[self.ranks.rank] = not_finite([self.flat], sums.loss)
        what = f"gradients of step {number}"
        if self.optimizer is None:
            self.ranks.add(self.flat, what)
        else:
            self.ranks.add_share(self.flat, what)
        pieces = [getattr(sums, name).to(torch.float64).reshape(-1) for name in sums.__dataclass_fields__]
        pieces.append(mine)
        if flags is not None:
            pieces.append(flags.to(torch.float64))
        together = torch.cat(pieces)
        self.ranks.add(together, f"loss sums of step {number}")
        parts = together.split([len(piece) for piece in pieces])
        added = {
            name: part.reshape(getattr(sums, name).shape).to(getattr(sums, name).dtype)
            for name, part in zip(sums.__dataclass_fields__, parts, strict=False)
        }
        self.culprits = Culprits(parts[len(added)] > 0, range(self.ranks.size))
        return Sums(**added), None if flags is None else parts[-1] > 0
