"""The drafter's matrices in the dtype of its products, cast once a step instead of once a pass.

Masters stay float32. Inside `standing_in` each of them is replaced in its module by a twin in the products'
dtype, so that every pass multiplies by the same copy; what a pass's backward leaves in the twins is added to
the masters' float32 gradients before the next pass. The values are those of autocast, which casts each weight
anew for every pass; norms keep their float32 weights, as under autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Twins:
    """Twins of the weights and biases of all linear layers; none where those have the products' dtype."""

    def __init__(self, drafter: nn.Module, dtype: torch.dtype) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for module in drafter.modules():
            for name, master in module.named_parameters(recurse=False):
                if isinstance(module, nn.Linear) and master.dtype != dtype:
                    self._places.append((module, name, master, nn.Parameter(master.detach().to(dtype))))

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """The twins, with the masters' present values, take the masters' places."""
        if self._places:
            _, _, masters, twins = zip(*self._places, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(twins, masters)
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
                if master.grad is None:
                    master.grad = twin.grad.to(master.dtype)
                else:
                    master.grad.add_(twin.grad)
                twin.grad = None
