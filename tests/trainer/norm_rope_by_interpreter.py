"""The kernels of norm and RoPE by Triton's interpreter, which needs no GPU, beside float64 arithmetic.

For each case the largest errors of the output and of each gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model import norm_rope


def plain(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Element by element of the definition, halves paired as (first, second)."""
    normed = weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    first, second = normed.chunk(2, -1)
    cos_a, cos_b = cos[:, :, None].chunk(2, -1)
    sin_a, sin_b = sin[:, :, None].chunk(2, -1)
    return torch.cat((first * cos_a - second * sin_a, second * cos_b + first * sin_b), -1)


def compared(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, programs: int, eps: float
) -> dict[str, object]:
    norm_rope.PROGRAMS = programs
    generator = torch.Generator().manual_seed(len(name))
    x, upstream = (torch.randn(shape, generator=generator).to(dtype) for _ in "ab")
    weight = 1 + torch.randn(shape[-1], generator=generator)
    angle = 9 * torch.randn(*shape[:2], shape[-1], generator=generator)  # the halves differ: both are read
    cos, sin = angle.cos(), angle.sin()
    mine, own = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = norm_rope.norm_rope(mine, own, eps, cos, sin)
    out.backward(upstream)
    exact, other = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = plain(exact, other, eps, cos.double(), sin.double())
    wanted.backward(upstream.double())
    assert mine.grad is not None and own.grad is not None
    assert exact.grad is not None and other.grad is not None
    errors = {
        "out": float((out.detach().double() - wanted.detach()).abs().max()),
        "x": float((mine.grad.double() - exact.grad).abs().max()),
        "weight": float((own.grad.double() - other.grad).abs().max() / other.grad.abs().max()),
    }
    return {"name": name, "dtype": str(dtype), "errors": errors}


def run() -> list[dict[str, object]]:
    return [
        compared("whole tiles", (2, 8, 4, 16), torch.float32, 2, 1e-6),
        compared("ragged", (1, 7, 3, 32), torch.float32, 100, 1e-6),
        compared("one program", (3, 5, 1, 16), torch.float32, 1, 1e-2),
        compared("half", (2, 9, 4, 16), torch.float16, 3, 1e-6),
    ]
