"""AdamW's update of one tensor in one pass over memory: a Triton kernel for a GPU.

It reads gradient, weight and moments once, and writes the weight's twin (twins.py) as well, which would
otherwise be a pass of its own over all weights. At 28 bytes a weight nothing but memory counts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, twin, rate, count, divisor, bad,
    rest1, rest2, log2_beta1, log2_beta2, eps, decay, elements, BLOCK: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    """Update `elements` numbers of weight, first and second (moments), float32, and with TWIN of the twin.

    Args:
        rate, count, divisor, bad: one number each, in memory. count is of updates, this one included; where
            bad is not 0, nothing is written but the twin.
        rest1, rest2: 1 - beta, whose digits a float32 beta would not have.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < elements
    good = tl.load(bad) == 0.0
    w = tl.load(weight + at, mask=there)
    if good:
        lr, updates = tl.load(rate), tl.load(count).to(tl.float64)
        # 1 - beta**count is small at first: in float64, or few of its digits would be right.
        whole1 = (1.0 - tl.exp2(updates * log2_beta1)).to(tl.float32)
        whole2 = (1.0 - tl.exp2(updates * log2_beta2)).to(tl.float32)
        g = tl.load(gradient + at, mask=there) / tl.load(divisor)
        m, v = tl.load(first + at, mask=there), tl.load(second + at, mask=there)
        m = m + rest1 * (g - m)
        v = v + rest2 * (g * g - v)
        w = w - lr * decay * w
        w = w - (lr / whole1) * m / (tl.sqrt(v) / tl.sqrt(whole2) + eps)
        tl.store(first + at, m, mask=there)
        tl.store(second + at, v, mask=there)
        tl.store(weight + at, w, mask=there)
    if TWIN:
        tl.store(twin + at, w.to(twin.dtype.element_ty), mask=there)
