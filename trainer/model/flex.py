"""Flex attention under the drafter's rule: the GPU's way, compiled there once per process and shape."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.model.mask import Bounds, mask_mod
from trainer.model.tiles import TILE, ordered, tile_map
from trainer.training.compiled import where_it_pays


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
