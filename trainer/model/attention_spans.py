"""Which keys a tile of positions reads, and which positions read a tile of keys, for the attention kernels.

A position sees an interval of its row's context, and its own block (trainer/model/mask.py). So a tile of
positions sees nothing outside one span of tokens, and all of it see everything in a span within that: only
what is in the first and not in the second need be compared with the rule. The same holds the other way
round, for the gradients of keys. All of it is arithmetic on the ends of intervals, with fixed shapes and
nothing read back, made once for all layers of one window.

Rows R, positions Q, row tokens S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.model.compiled import where_it_pays
from trainer.model.mask import Bounds


class Tiles(NamedTuple):
    """Of one kernel: rows and context keys in a tile, keys of the own blocks in one, warps, stages."""

    rows: int
    keys: int
    own: int
    warps: int
    stages: int


FORWARD = Tiles(64, 64, 32, 4, 3)
QUERIES = Tiles(128, 64, 32, 8, 3)
KEYS = Tiles(64, 64, 32, 4, 2)


@dataclass(frozen=True)
class Spans:
    """The rule, and where tiles of rows and tiles of keys meet by it. All int32.

    low, high: [R, Q] context tokens that a position sees; a dead one's high is -1.
    forward, queries: [R, tiles of positions, 4] tokens first, whole, rest, last: none of the tile sees any
    outside [first, last), and all see those in [whole, rest). keys: [R, tiles of keys, 4] the same, in tiles
    of positions.
    """

    low: Tensor
    high: Tensor
    forward: Tensor
    queries: Tensor
    keys: Tensor
    row_tokens: int
    block_size: int
    causal: bool
    pack: int


def packed(share: int) -> int:
    """How many of the query heads that share a key head go together: the largest power of 2, 16 at most."""
    return min(share & -share, 16)


def spans_of(rule: Bounds, share: int) -> Spans:
    """
    Args:
        share: query heads that share a key head.
    """
    pack = packed(share)
    low, high, forward, queries, keys = where_it_pays(_tensors, rule.low)(rule, pack)
    return Spans(low, high, forward, queries, keys, rule.row_tokens, rule.block_size, rule.causal, pack)


def _tensors(rule: Bounds, pack: int) -> tuple[Tensor, ...]:
    low = torch.where(rule.alive, rule.low.clamp(min=0), 0).to(torch.int32)
    high = torch.where(rule.alive, rule.high, -1).to(torch.int32)
    forward = row_spans(rule, FORWARD.rows // pack)
    queries = row_spans(rule, QUERIES.rows // pack)
    return low, high, forward, queries, key_spans(rule, KEYS.rows // pack, KEYS.keys)


def row_spans(rule: Bounds, positions: int) -> Tensor:
    """`Spans.forward` for tiles of `positions` each; empty for a tile in which nobody is alive."""
    sees = rule.alive & (rule.low < rule.high)
    some = _by_tile(sees, positions, False).any(-1)

    def ends(values: Tensor, who: Tensor, nothing: int) -> Tensor:
        return _by_tile(torch.where(who, values, nothing), positions, nothing)

    far = rule.row_tokens
    first, last = ends(rule.low, sees, far).amin(-1), ends(rule.high, sees, 0).amax(-1)
    # A dead position is no reason to compare: what it reads counts for nothing.
    whole, rest = ends(rule.low, rule.alive, 0).amax(-1), ends(rule.high, rule.alive, far).amin(-1)
    found = torch.stack((first, whole, rest, last), -1).clamp(0, far)
    return torch.where(some[..., None], found, 0).to(torch.int32)


def key_spans(rule: Bounds, positions: int, keys: int) -> Tensor:
    """`Spans.keys` for tiles of `keys` and of `positions` each."""
    first, whole, rest, last = row_spans(rule, positions).unbind(-1)  # [R, tiles of positions]
    begin = torch.arange(0, rule.row_tokens, keys, device=first.device)[:, None]
    end = (begin + keys).clamp(max=rule.row_tokens)
    # [R, tiles of keys, tiles of positions]: some of the positions see some of the keys; all see all of them.
    touched = (first[:, None] < end) & (last[:, None] > begin) & (first < last)[:, None]
    full = touched & (whole[:, None] <= begin) & (rest[:, None] >= end)
    count, tile = first.shape[1], torch.arange(first.shape[1], device=first.device)
    some = touched.any(-1)
    start = torch.where(some, touched.byte().argmax(-1), 0)
    stop = torch.where(some, count - touched.flip(-1).byte().argmax(-1), 0)
    # Full tiles need not be neighbours: the first run of them counts, the others are compared with the rule.
    full_start = torch.where(full.any(-1), full.byte().argmax(-1), stop)
    run = (full | (tile < full_start[..., None])).byte().cumprod(-1).sum(-1)  # tiles before the first gap
    full_stop = torch.maximum(torch.minimum(run, stop), full_start)
    return torch.stack((start, full_start, full_stop, stop), -1).to(torch.int32)


def _by_tile(values: Tensor, positions: int, nothing: int | bool) -> Tensor:
    """[R, Q] as [R, tiles, positions]."""
    return pad(values, (0, -values.shape[1] % positions), value=nothing).unflatten(1, (-1, positions))


def seen_by_kernels(rule: Spans, row: int, queries: Sequence[int]) -> Tensor:
    """[3, len(queries), S + Q] bool, on the CPU: what `queries` see by each of the three kernels (forward,
    gradients of queries, gradients of keys), read from the spans as they read them. For the self-check.
    """
    at, key = torch.tensor(queries), torch.arange(rule.row_tokens)
    low, high = rule.low[row].cpu()[at, None], rule.high[row].cpu()[at, None]
    by_rule = (key >= low) & (key < high)
    ways = []
    for own, size in ((rule.forward, FORWARD), (rule.queries, QUERIES)):
        first, whole, rest, last = own[row].cpu()[at // (size.rows // rule.pack), :, None].unbind(1)
        first, whole = first // size.keys * size.keys, -(-whole // size.keys) * size.keys
        rest = rest // size.keys * size.keys
        ways.append((key >= first) & (key < last) & (((key >= whole) & (key < rest)) | by_rule))
    place = (at // (KEYS.rows // rule.pack))[:, None]
    first, whole, rest, last = rule.keys[row].cpu()[key // KEYS.keys].unbind(-1)
    ways.append((place >= first) & (place < last) & (((place >= whole) & (place < rest)) | by_rule))
    other = torch.arange(rule.low.shape[1])
    block = at[:, None] // rule.block_size == other // rule.block_size
    if rule.causal:
        block &= other <= at[:, None]
    return torch.stack([torch.cat((way, block), 1) & (high >= 0) for way in ways])
