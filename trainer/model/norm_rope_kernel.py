"""Triton kernels of what a head's queries and keys go through between projection and attention: RMS norm with
a weight, then RoPE; and its gradients.

Compiled from plain operations, the two halves that RoPE exchanges are read and normed twice, and the
gradient comes in three pieces, each of which reads and writes all of it: four to six times as long as
memory takes to read and write once. A program of `forward` does one tile, ROWS heads of tokens. One of
`gradients` does every n-th tile, n being the number of programs, so that the weight's gradient is a sum of
few parts, made in one order.

Tensors are contiguous: x, y [T, heads, SIZE], cos and sin [T, SIZE], of which both halves are read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _halves(tensor, at, SIZE: tl.constexpr, mask):  # type: ignore[no-untyped-def]
    first = tl.load(tensor + at, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(tensor + at + SIZE // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _places(tile, rows, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the first halves in x and in cos, and whether they are there; all of [ROWS, SIZE / 2] at most."""
    row, half = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE // 2)[None, :]
    at = row.to(tl.int64)[:, None] * SIZE + half
    return at, (row // HEADS)[:, None] * SIZE + half, (row < rows)[:, None]


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, y, rows, eps, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    at, token, there = _places(tl.program_id(0), rows, HEADS, SIZE, ROWS)
    a, b = _halves(x, at, SIZE, there)
    half = tl.arange(0, SIZE // 2)[None, :]
    w_a, w_b = _halves(weight, half, SIZE, half >= 0)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
    a, b = a * scale * w_a, b * scale * w_b
    cos_a, cos_b = _halves(cos, token, SIZE, there)
    sin_a, sin_b = _halves(sin, token, SIZE, there)
    tl.store(y + at, (a * cos_a - b * sin_a).to(y.dtype.element_ty), mask=there)
    tl.store(y + at + SIZE // 2, (b * cos_b + a * sin_b).to(y.dtype.element_ty), mask=there)


@triton.jit
def gradients(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, d_y, d_x, parts, rows, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """parts: [programs, SIZE] float32, to be summed to the weight's gradient."""
    half = tl.arange(0, SIZE // 2)
    w_a, w_b = _halves(weight, half[None, :], SIZE, (half >= 0)[None, :])
    d_w_a, d_w_b = tl.zeros([SIZE // 2], tl.float32), tl.zeros([SIZE // 2], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        at, token, there = _places(tile, rows, HEADS, SIZE, ROWS)
        a, b = _halves(x, at, SIZE, there)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        a, b = a * scale, b * scale
        cos_a, cos_b = _halves(cos, token, SIZE, there)
        sin_a, sin_b = _halves(sin, token, SIZE, there)
        turned_a, turned_b = _halves(d_y, at, SIZE, there)
        d_a, d_b = turned_a * cos_a + turned_b * sin_b, turned_b * cos_b - turned_a * sin_a
        d_w_a += tl.sum(d_a * a, 0)
        d_w_b += tl.sum(d_b * b, 0)
        d_a, d_b = d_a * w_a, d_b * w_b
        along = ((tl.sum(d_a * a, 1) + tl.sum(d_b * b, 1)) / SIZE)[:, None]
        tl.store(d_x + at, (scale * (d_a - along * a)).to(d_x.dtype.element_ty), mask=there)
        tl.store(d_x + at + SIZE // 2, (scale * (d_b - along * b)).to(d_x.dtype.element_ty), mask=there)
    place = parts + tl.program_id(0) * SIZE + half
    tl.store(place, d_w_a)
    tl.store(place + SIZE // 2, d_w_b)
