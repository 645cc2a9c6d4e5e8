"""RMS norm and RoPE of queries or keys as one operation on a GPU: our own kernels (norm_rope_kernel.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.model.gpu_kernels import run_here

ROWS = 32  # heads of tokens in a tile
PROGRAMS = 2048  # at most, of the gradients; the sum of their parts has one order
WARPS = 2
SIZES = (16, 32, 64, 128, 256)  # of a head


def runs_here(x: Tensor) -> bool:
    """Whether the kernels take these: 16-bit numbers on a GPU, heads of a size that they know."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] in SIZES
    return x.is_cuda and fits and run_here()


def norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """rotate(x / rms(x) * weight) [R, T, heads, E] in x's dtype, computed in float32 throughout.

    Args:
        x: [R, T, heads, E]. weight: [E]. cos, sin: [R, T, E] float32.
    """
    made: Tensor = _norm_rope(x.contiguous(), weight, cos.contiguous(), sin.contiguous(), eps)
    return made


def _shape(x: Tensor) -> dict[str, int]:
    return {"HEADS": x.shape[-2], "SIZE": x.shape[-1], "ROWS": ROWS, "num_warps": WARPS}


@torch.library.custom_op("dflash::norm_rope", mutates_args=())
def _norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    from trainer.model import norm_rope_kernel

    y, rows = torch.empty_like(x), x.numel() // x.shape[-1]
    with torch.cuda.device_of(x):  # Triton launches on the thread's device, whatever the tensors' is
        norm_rope_kernel.forward[(-(-rows // ROWS),)](x, weight, cos, sin, y, rows, eps, **_shape(x))
    return y


@_norm_rope.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dflash::norm_rope_backward", mutates_args=())
def _gradients(
    d_y: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from trainer.model import norm_rope_kernel

    d_x, rows = torch.empty_like(x), x.numel() // x.shape[-1]
    programs = min(PROGRAMS, -(-rows // ROWS))
    parts = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    d_y = d_y.contiguous()
    with torch.cuda.device_of(x):
        norm_rope_kernel.gradients[(programs,)](x, weight, cos, sin, d_y, d_x, parts, rows, eps, **_shape(x))
    return d_x, parts.sum(0).to(weight.dtype)


@_gradients.register_fake
def _(d_y: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(d_y, *ctx.saved_tensors, ctx.eps), None, None, None


_norm_rope.register_autograd(_backward, setup_context=_keep)
