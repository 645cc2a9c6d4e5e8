"""Logits into the gradient of their cross-entropy, in place: a Triton kernel for a GPU.

A row of logits is read twice and written once. Plain operations, even compiled into few, hold float32
copies of all logits and go over memory four times as often: between two products of the frozen head that
was a sixth of the loss's time on an H200. One program does one row: the first look finds the largest logit
and the sum of exponentials (rescaled whenever a larger logit comes), the second writes softmax minus one-
hot, last columns first, for those are what the cache still holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 512  # of a row that are looked at together: many small programs hide each other's waits
WARPS = 1


@triton.jit
def _errors(logits, labels, losses, right, words, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, COLUMNS)

    best = -float("inf")
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, words, COLUMNS):
        at = first + columns
        x = tl.load(start + at, mask=at < words, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - larger) + tl.exp(x - larger)
        best = larger
    own = tl.load(start + label).to(tl.float32)
    whole = tl.sum(total, 0)

    place = words  # of the largest logit, the first one if several are equal
    blocks = tl.cdiv(words, COLUMNS)
    for number in range(0, blocks):
        at = (blocks - 1 - number) * COLUMNS + columns
        x = tl.load(start + at, mask=at < words, other=-float("inf")).to(tl.float32)
        place = tl.minimum(place, tl.min(tl.where(x == best, at, words), 0))
        p = tl.exp(x - best) / whole  # not exp of a difference of large numbers
        tl.store(start + at, tl.where(at == label, p - 1, p).to(logits.dtype.element_ty), mask=at < words)
    tl.store(losses + row, best - own + tl.log(whole))
    tl.store(right + row, place == label)


def errors_in_place(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite logits [c, V] with softmax - one-hot(label).

    Args:
        labels: [c], valid columns.
    Returns:
        each row's -log p(label), float32, and whether the label is the first largest logit.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    right = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    with torch.cuda.device_of(logits):  # Triton launches on the thread's device, whatever the tensors' is
        _errors[(len(logits),)](
            *(logits, labels, losses, right, logits.shape[1], logits.stride(0)),
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return losses, right
