"""Which tiles of a block mask hold anything, without asking the mask about a single element.

Flex attention works in tiles of 128 queries by 128 keys and wants to know of each: nothing seen, everything
seen, or ask the rule. Every query sees two intervals of keys, its context [low, high) and its own block, so a
tile is touched if some query's interval meets it, and whole if all queries' intervals cover it. That is
arithmetic on the ends of intervals: all shapes are fixed, nothing is read back, and the cost is queries times
context / 128 instead of queries times keys. Anchors that rise along the row, as
`trainer.training.objective.choose_anchors` gives them, touch the fewest tiles.

Rows R, queries Q, row tokens S, query tiles G = ceil(Q / 128), key tiles K = ceil((S + Q) / 128).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.model.mask import Bounds, own_keys

TILE = 128


def tile_map(rule: Bounds) -> tuple[Tensor, Tensor]:
    """(partly, whole), each [R, G, K] bool: tiles in which some, but not all elements are seen; and all."""
    rows, queries = rule.low.shape
    keys = rule.row_tokens + queries
    begin = TILE * torch.arange(_tiles(keys), device=rule.low.device)
    end = begin + TILE

    # The context, query by query: between the documents of one tile's queries there may be untouched tiles.
    low, high = _by_tile(rule.low, rule.alive, keys), _by_tile(rule.high, rule.alive, 0)
    count = _tiles(rule.row_tokens)
    touches = (low[..., None] < end[:count]) & (high[..., None] > begin[:count]) & (low < high)[..., None]
    touched = pad(touches.any(2), (0, len(begin) - count))
    whole = (low.amax(2)[..., None] <= begin) & (high.amin(2)[..., None] >= end)

    # The own blocks, together: the dead queries between two live ones of a tile are fewer than a tile, so the
    # span from the first key to the last has no untouched tile within. Context and own block never cover a
    # tile together, for the row's last token is before no anchor.
    first, last = own_keys(rule, torch.arange(queries, device=rule.low.device))
    low = _by_tile(first.expand(rows, -1), rule.alive, keys)
    high = _by_tile(last.expand(rows, -1), rule.alive, 0)
    touched = touched | ((low.amin(2)[..., None] < end) & (high.amax(2)[..., None] > begin))
    whole = whole | ((low.amax(2)[..., None] <= begin) & (high.amin(2)[..., None] >= end))
    return touched & ~whole, whole


def tile_map_within(first: Tensor) -> tuple[Tensor, Tensor]:
    """(partly, whole), each [R, G, G] bool, of the target's rule (trainer/model/within.py).

    The intervals of neighbouring queries touch, so the keys of a tile of queries are one interval, too.

    Args:
        first: [R, S] the first token that each query sees; the last is itself.
    """
    rows, size = first.shape
    begin = TILE * torch.arange(_tiles(size), device=first.device)
    end = begin + TILE
    query = torch.arange(size, device=first.device).expand(rows, -1)
    everyone = torch.ones_like(first, dtype=torch.bool)
    low, high = _by_tile(first, everyone, size), _by_tile(query + 1, everyone, 0)
    touched = (low.amin(2)[..., None] < end) & (high.amax(2)[..., None] > begin)
    whole = (low.amax(2)[..., None] <= begin) & (high.amin(2)[..., None] >= end)
    return touched & ~whole, whole


def _tiles(size: int) -> int:
    return -(-size // TILE)


def _by_tile(ends: Tensor, alive: Tensor, nothing: int) -> Tensor:
    """[R, Q] as [R, G, 128]; `nothing`, an end of an empty interval, where dead and behind the last query."""
    ends = torch.where(alive, ends, nothing)
    short = TILE * _tiles(ends.shape[1]) - ends.shape[1]
    return pad(ends, (0, short), value=nothing).unflatten(1, (-1, TILE))


def ordered(present: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row of tiles are present, and their numbers, those first: flex attention's form.

    Args:
        present: [R, G, K] bool.
    Returns:
        [R, 1, G] and [R, 1, G, K] int32, for all heads.
    """
    numbers = present.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return present.sum(-1, dtype=torch.int32)[:, None], numbers.to(torch.int32)[:, None]
