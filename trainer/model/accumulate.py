"""Gradients of several passes added up in float32, whatever they come in: added in bfloat16, those of later
passes would be lost to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.gpu_kernels import run_here

BLOCK = 2048
LEAST = 1 << 20  # elements, below which a launch of ours costs more time than it saves


def accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """`total` with `part` added in place; a new sum of it where there is none. float32 at least."""
    wide = torch.promote_types(part.dtype, torch.float32)
    narrow = part.dtype in (torch.bfloat16, torch.float16)
    if part.is_cuda and narrow and part.numel() >= LEAST and run_here():
        made = torch.empty_like(part, dtype=wide) if total is None else total
        if _alike(made, part):
            return add_by_kernel(made, part, first=total is None)
    return part.to(wide) if total is None else total.add_(part)


def add_by_kernel(total: Tensor, part: Tensor, first: bool) -> Tensor:
    """`total` += `part`, or with `first` = `part`; it is returned.

    Both lie in memory without holes, in the same order of elements: total in float32, part on a GPU.
    """
    from trainer.model import accumulate_kernel

    elements = part.numel()
    with torch.cuda.device_of(part):  # Triton launches on the thread's device, whatever the tensors' is
        accumulate_kernel.add[(-(-elements // BLOCK),)](total, part, elements, BLOCK=BLOCK, FIRST=first)
    torch.autograd.graph.increment_version(total)
    return total


def _alike(total: Tensor, part: Tensor) -> bool:
    dense = part.is_contiguous() or (part.dim() == 4 and part.transpose(1, 2).is_contiguous())
    return dense and total.stride() == part.stride() and total.dtype == torch.float32
