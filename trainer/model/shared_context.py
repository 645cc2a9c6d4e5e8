"""The context's keys and values for several passes of blocks: computed once, the gradients pushed back once.

Each pass reads them as leaves, so its backward ends there. What reaches the leaves adds up, and one backward
through the taps' projection and norms takes the sum: the chain rule, with the sum taken early. A pass needs
no more memory than its own blocks, however many passes there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.accumulate import accumulate
from trainer.model.drafter import KeyValue


class SharedContext:
    """For each pass: read `leaves`, run its backward, `gather`. After the last one: `push`."""

    def __init__(self, computed: list[KeyValue]) -> None:
        self._computed = [tensor for pair in computed for tensor in pair]
        self._leaves = [tensor.detach().requires_grad_() for tensor in self._computed]
        self._sums: list[Tensor] = []

    @property
    def leaves(self) -> list[KeyValue]:
        """One pair a layer, as `Drafter.forward` takes them."""
        return list(zip(self._leaves[::2], self._leaves[1::2], strict=True))

    def gather(self) -> None:
        """Add what the last backward left: one pass's as it came, the sum of several in float32 at least."""
        found = []
        for leaf in self._leaves:
            assert leaf.grad is not None  # every layer's attention reads its context, even for dead blocks
            found.append(leaf.grad)
            leaf.grad = None
        if not self._sums:
            self._sums = found
            return
        self._sums = [
            accumulate(accumulate(None, total), each) for total, each in zip(self._sums, found, strict=True)
        ]

    def push(self) -> None:
        """Backward through the context's own graph, into the drafter's parameters."""
        computed = [tensor.to(like.dtype) for tensor, like in zip(self._sums, self._computed, strict=True)]
        torch.autograd.backward(self._computed, computed)
