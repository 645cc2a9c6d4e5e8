"""Logits into a multiple of the gradient of their cross-entropy, in place: a Triton kernel for a GPU.

A row of logits is read once and written once. Plain operations, even compiled into few, hold float32 copies
of all logits and go over memory six times as often: between two products of the frozen head that was a sixth
of the loss's time on an H200. One program does one row. It cannot know the sum of exponentials before it has
seen them all, so it writes exp(logit - base) and tells what to multiply the row's gradient by afterwards: one
number a row, where a second look would be another read of the logits. The base is the label's logit or one
near the largest; bfloat16 has float32's range, so it need not be the largest itself. Where a logit exceeds it
by far, what is written already is scaled down, which real rows hardly ever need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, DEEP = 1024, 4  # of a row that are looked at together, DEEP pieces of COLUMNS
WARPS = 4  # each thread loads 16 bytes of each piece; on an H200 that is 3.9 of its 4.8 TB/s
FAR = tl.constexpr(40.0)  # above the base: e^40 times a vocabulary is far from float32's largest number


@triton.jit
def _errors(  # type: ignore[no-untyped-def]
    logits, labels, losses, right, scales, words, stride, COLUMNS: tl.constexpr, DEEP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    label = tl.load(labels + row).to(tl.int32)
    columns = tl.arange(0, DEEP)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    own = tl.load(start + label).to(tl.float32)

    coming = tl.load(start + columns, mask=columns < words, other=-float("inf"))
    base = tl.maximum(own, tl.max(coming.to(tl.float32)))
    total = tl.zeros([COLUMNS], tl.float32)
    beaten = tl.zeros([COLUMNS], tl.int32)  # a column is likelier than the label, or as likely before it
    for first in range(0, words, DEEP * COLUMNS):
        at = first + columns
        x, then = coming.to(tl.float32), at + DEEP * COLUMNS
        coming = tl.load(start + then, mask=then < words, other=-float("inf"))  # while these are worked on
        largest = tl.max(x)
        if largest > base + FAR:
            down = tl.exp(base - largest)
            tl.debug_barrier()  # what was written may be read by another thread
            for before in range(0, first, DEEP * COLUMNS):
                there = start + before + columns
                tl.store(there, (tl.load(there).to(tl.float32) * down).to(logits.dtype.element_ty))
            total *= down
            base = largest
        e = tl.exp(x - base)
        total += tl.sum(e, 0)
        beaten |= tl.max(((x > own) | ((x == own) & (at < label))).to(tl.int32), 0)
        tl.store(start + at, e.to(logits.dtype.element_ty), mask=at < words)
    whole = tl.sum(total, 0)
    tl.debug_barrier()  # and the label's column is written a second time
    tl.store(start + label, (tl.exp(own - base) - whole).to(logits.dtype.element_ty))
    tl.store(losses + row, base - own + tl.log(whole))
    tl.store(right + row, tl.max(beaten, 0) == 0)
    tl.store(scales + row, 1 / whole)


def errors_in_place(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite logits [c, V], bfloat16 or float32, with (softmax - one-hot(label)) / scale.

    Args:
        labels: [c], valid columns.
    Returns:
        of each row the scale, float32; -log p(label), float32; whether the label is the first largest logit.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    scales, right = torch.empty_like(losses), torch.empty_like(losses, dtype=torch.bool)
    with torch.cuda.device_of(logits):  # Triton launches on the thread's device, whatever the tensors' is
        _errors[(len(logits),)](
            *(logits, labels, losses, right, scales, logits.shape[1], logits.stride(0)),
            COLUMNS=COLUMNS,
            DEEP=DEEP,
            num_warps=WARPS,
        )
    return scales, losses, right
