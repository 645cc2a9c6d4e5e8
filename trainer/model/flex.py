"""Flex attention, compiled once per process: the GPU's way to attend under a block mask."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, grouped: bool) -> Tensor:
    """Attention [R, A, Q, E] under a BlockMask; on the CPU uncompiled, for comparison only."""
    from torch.nn.attention.flex_attention import flex_attention

    run = _compiled() if q.is_cuda else flex_attention
    return run(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
