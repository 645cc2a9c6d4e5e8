"""The drafter's matrices in the dtype of its products, cast once a step instead of once a pass.

Masters stay float32. Inside `standing_in` each of them is replaced in its module by a twin in the products'
dtype, so that every pass multiplies by the same copy; what a pass's backward leaves in the twins is added to
the masters' float32 gradients before the next pass. The values are those of autocast, which casts each weight
anew for every pass; norms keep their float32 weights, as under autocast.

Whoever writes a master and its twin at once (adamw.py) says so with `keeps_up`, and spares the cast. Any
other change of a master, which torch counts in its version, is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.model.accumulate import accumulate


def twin_of(master: Tensor) -> nn.Parameter | None:
    """The twin that was made last; None: the master has none."""
    return getattr(master, "twin", None)


def keeps_up(master: Tensor) -> None:
    """The master's twin has its present values."""
    master.twin.version = master._version  # type: ignore[attr-defined]


class Twins:
    """Twins of the weights and biases of all linear layers; none where those have the products' dtype."""

    def __init__(self, drafter: nn.Module, dtype: torch.dtype) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for module in drafter.modules():
            for name, master in module.named_parameters(recurse=False):
                if isinstance(module, nn.Linear) and master.dtype != dtype:
                    twin = nn.Parameter(master.detach().to(dtype))
                    master.twin = twin  # type: ignore[attr-defined]
                    keeps_up(master)
                    self._places.append((module, name, master, twin))

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """The twins, with the masters' present values, take the masters' places."""
        # A graph that is being captured has the cast in it: nobody asks for versions when it is replayed.
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        places = [(master, twin) for _, _, master, twin in self._places]
        stale = [(one, twin) for one, twin in places if capturing or twin.version != one._version]  # type: ignore[attr-defined]
        if stale:
            masters, twins = zip(*stale, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(twins, masters)
            for master, twin in stale:
                twin.version = master._version  # type: ignore[attr-defined]
        try:
            for module, name, _, twin in self._places:
                module._parameters[name] = twin
            yield
        finally:
            for module, name, master, _ in self._places:
                module._parameters[name] = master

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradients that a backward left in the twins to the masters'."""
        for _, _, master, twin in self._places:
            if twin.grad is not None:
                master.grad, twin.grad = accumulate(master.grad, twin.grad), None
