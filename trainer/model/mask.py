"""Who sees whom. One rule, used by the dense mask of the CPU and by flex attention's block mask.

Keys are the row's S context tokens followed by the N blocks of B tokens; queries are the N blocks' tokens. A
query of block j, slot o, whose anchor is token a of document d, sees
  context token t   if t is of document d and t < a (strictly: the target has not yet read the anchor when the
                    block is drafted); in a sliding layer of window W also t >= a + o - (W - 1);
  block token (j,p) always in a full layer; only p <= o in a sliding layer (as SGLang serves them).
It never sees another block, however close its anchor. A dead block (keep false) sees nothing and is seen by
nobody.

Rows R, row tokens S, anchors a row N, block size B, queries Q = N * B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Bounds:
    """Per query the context tokens [low, high) that it sees, and whether its block is alive; all [R, Q]."""

    low: Tensor
    high: Tensor
    alive: Tensor
    row_tokens: int
    block_size: int
    causal: bool  # inside the block


def bounds(anchors: Tensor, keep: Tensor, doc_start: Tensor, block_size: int, window: int | None) -> Bounds:
    """The visible context of every query.

    Args:
        anchors: [R, N] index of each block's anchor in its row; any valid index where keep is false.
        keep: [R, N] bool.
        doc_start: [R, S] index of the first token of each token's document.
        window: tokens that a query reaches back over, itself included; None: a full layer.
    """
    start = doc_start.gather(1, anchors)[:, :, None]  # [R, N, 1]
    anchor = anchors[:, :, None]
    if window is None:
        low = start.expand(-1, -1, block_size)
    else:
        slot = torch.arange(block_size, device=anchors.device)
        low = torch.maximum(start, anchor + slot - (window - 1))
    high = anchor.expand(-1, -1, block_size)
    alive = keep[:, :, None].expand(-1, -1, block_size)
    return Bounds(
        low.flatten(1), high.flatten(1), alive.flatten(1), doc_start.shape[1], block_size, window is not None
    )


def own_keys(rule: Bounds, query: Tensor) -> tuple[Tensor, Tensor]:
    """First and last + 1 of the keys of a query's own block that it sees."""
    first = rule.row_tokens + query - query % rule.block_size
    return first, rule.row_tokens + query + 1 if rule.causal else first + rule.block_size


def sees(rule: Bounds, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether `query` of `row` sees `key`; the index tensors broadcast against each other."""
    first, last = own_keys(rule, query)
    context = (key >= rule.low[row, query]) & (key < rule.high[row, query])
    return (context | ((key >= first) & (key < last))) & rule.alive[row, query]


def dense_mask(rule: Bounds) -> Tensor:
    """[R, 1, Q, S + Q] bool, true where seen: for scaled_dot_product_attention."""
    rows, queries = rule.low.shape
    device = rule.low.device
    row = torch.arange(rows, device=device)[:, None, None]
    query = torch.arange(queries, device=device)[None, :, None]
    key = torch.arange(rule.row_tokens + queries, device=device)[None, None, :]
    return sees(rule, row, query, key)[:, None]


def mask_mod(rule: Bounds) -> MaskMod:
    """The rule in flex attention's form; the head index is ignored, so one mask serves all heads."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(rule, row, query, key)

    return visible
