"""Flex attention under the drafter's and the target's rule: the GPU's way, compiled there once per process
and shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.model.compiled import where_it_pays
from trainer.model.mask import Bounds, mask_mod
from trainer.model.tiles import TILE, ordered, tile_map, tile_map_within
from trainer.model.within import within_mod


def flex_mask(rule: Bounds) -> BlockMask:
    """The rule as a BlockMask [R, heads broadcast, Q, S + Q]: tiles by arithmetic, elements by the rule."""
    partly, whole = where_it_pays(tile_map, rule.low)(rule)
    queries = rule.low.shape[1]
    return BlockMask.from_kv_blocks(
        *ordered(partly),
        *ordered(whole),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod(rule),
        seq_lengths=(queries, rule.row_tokens + queries),
    )


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, grouped: bool) -> Tensor:
    """Attention [R, A, Q, E] under a BlockMask, zero for queries that see nothing; on the CPU uncompiled."""
    out: Tensor = where_it_pays(flex_attention, q)(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


def flex_within(first: Tensor) -> BlockMask:
    """The target's rule as a BlockMask [R, heads broadcast, S, S].

    Args:
        first: [R, S] from `trainer.model.within.first_seen`.
    """
    partly, whole = where_it_pays(tile_map_within, first)(first)
    size = first.shape[1]
    return BlockMask.from_kv_blocks(
        *ordered(partly),
        *ordered(whole),
        BLOCK_SIZE=TILE,
        mask_mod=within_mod(first),
        seq_lengths=(size, size),
    )


def flex_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None, cap: float | None
) -> Tensor:
    """Attention of a frozen target [R, A, S, E] under a BlockMask; fewer key heads are shared.

    Args:
        scale: None: 1 / sqrt(E).
        cap: scores are bent to within +-cap by tanh; None: left as they are.
    """
    alone = q.is_cuda and not torch.compiler.is_compiling()
    out: Tensor = (_compiled_capped() if alone else _attend_capped)(q, k, v, mask, scale, cap)
    return out


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None, cap: float | None
) -> Tensor:
    bent = None if cap is None else _capped(cap)
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = flex_attention(q, k, v, score_mod=bent, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


@cache
def _compiled_capped() -> Callable[..., Tensor]:
    """A function of its own: torch keeps few compiled shapes of each, and the drafter's are not to count.

    One too many is an error, not the quadratic memory of the uncompiled one.
    """
    return torch.compile(_attend_capped, dynamic=False, fullgraph=True)


def _capped(cap: float) -> Callable[..., Tensor]:
    def bent(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return bent
