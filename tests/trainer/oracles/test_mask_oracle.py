"""Who sees whom, element by element, on generated layouts; and attention by loops under that mask.

Run: python -m pytest tests/trainer/oracles/test_mask_oracle.py
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, seed, settings
from hypothesis import strategies as some
from slow_rules import Layout, layout, mask
from torch import Tensor

from trainer.model.drafter import attend
from trainer.model.flex import flex_mask
from trainer.model.mask import Bounds, bounds, dense_mask, mask_mod

WINDOWS = some.one_of(some.none(), some.integers(1, 14))


def rule_of(rows: list[Layout], block_size: int, window: int | None) -> Bounds:
    return bounds(
        torch.tensor([row.anchors for row in rows]),
        torch.tensor([row.keep for row in rows]),
        torch.tensor([row.starts for row in rows]),
        block_size,
        window,
    )


def by_mask_mod(rule: Bounds) -> Tensor:
    """Every element that flex attention could ask for. [R, Q, S + Q]."""
    rows, queries = rule.low.shape
    row, query = torch.arange(rows)[:, None, None], torch.arange(queries)[None, :, None]
    key = torch.arange(rule.row_tokens + queries)[None, None]
    return mask_mod(rule)(row, torch.tensor(0), query, key)


@seed(20260801)
@settings(max_examples=60, deadline=None, database=None)
@given(
    lengths=some.lists(some.integers(1, 12), min_size=1, max_size=5),
    blocks=some.integers(1, 6),
    block_size=some.integers(2, 5),
    window=WINDOWS,
    number=some.integers(0, 10**6),
)
@example(lengths=[1], blocks=1, block_size=2, window=1, number=0)
@example(lengths=[12], blocks=6, block_size=5, window=None, number=1)  # anchors closer than a block
@example(lengths=[1, 1, 1, 1], blocks=4, block_size=3, window=2, number=2)
def test_every_element_of_any_layout(
    lengths: list[int], blocks: int, block_size: int, window: int | None, number: int
) -> None:
    rows = [layout(lengths, blocks, number), layout(lengths[::-1], blocks, number + 1)]
    rule = rule_of(rows, block_size, window)
    wanted = torch.stack([mask(row, block_size, window) for row in rows])
    assert torch.equal(dense_mask(rule)[:, 0], wanted)
    assert torch.equal(by_mask_mod(rule), wanted)


@pytest.mark.parametrize("window", [None, 30])
def test_every_element_of_a_row_of_several_tiles(window: int | None) -> None:
    """384 tokens and 40 blocks: the block mask's tiles of 128 say "all", "none", or "ask the rule"."""
    row = layout([200, 50, 134], 40, 3)
    rule = rule_of([row], 8, window)
    wanted = mask(row, 8, window)
    assert torch.equal(dense_mask(rule)[0, 0], wanted)
    tiles = flex_mask(rule)
    whole = torch.zeros(3, 6, dtype=torch.bool)
    partly = torch.zeros(3, 6, dtype=torch.bool)
    for table, numbers, indices in (
        (whole, tiles.full_kv_num_blocks, tiles.full_kv_indices),
        (partly, tiles.kv_num_blocks, tiles.kv_indices),
    ):
        for tile in range(3):
            for place in range(int(numbers[0, 0, tile])):
                table[tile, int(indices[0, 0, tile, place])] = True
    asked = tiles.mask_mod(
        torch.tensor(0), torch.tensor(0), torch.arange(320)[:, None], torch.arange(704)[None, :]
    )
    for query_tile in range(3):
        for key_tile in range(6):
            part = (
                slice(128 * query_tile, min(128 * query_tile + 128, 320)),
                slice(128 * key_tile, min(128 * key_tile + 128, 704)),
            )
            if whole[query_tile, key_tile]:
                assert wanted[part].all()
            elif partly[query_tile, key_tile]:
                assert torch.equal(asked[part], wanted[part])
            else:
                assert not wanted[part].any()
    assert partly.any() and not (partly | whole).all()


def attention_by_loops(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One row; q [A, Q, E], k and v [G, T, E], seen [Q, T]. Zeros for queries that see nothing."""
    out = torch.zeros_like(q)
    for head in range(q.shape[0]):
        group = head // (q.shape[0] // k.shape[0])
        for query in range(q.shape[1]):
            keys = seen[query].nonzero()[:, 0].tolist()
            if not keys:
                continue
            scores = [float(q[head, query] @ k[group, key]) / math.sqrt(q.shape[2]) for key in keys]
            top = max(scores)
            parts = [math.exp(score - top) for score in scores]
            for key, part in zip(keys, parts, strict=True):
                out[head, query] += part / sum(parts) * v[group, key]
    return out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 6])
def test_dense_and_flex_attention_under_the_mask(
    window: int | None, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = layout([11, 7, 14], 5, 8)
    assert not all(row.keep)
    rule = rule_of([row], 4, window)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, 16, generator=generator)
        for heads, n in ((4, 20), (groups, 52), (groups, 52))
    )
    wanted = attention_by_loops(q[0].double(), k[0].double(), v[0].double(), mask(row, 4, window))
    for kind, held in ((dense_mask(rule), 1 << 26), (dense_mask(rule), 0), (flex_mask(rule), 0)):
        # Above this many scores the dense mask goes to torch's fused attention.
        monkeypatch.setattr("trainer.model.drafter.MOST_SCORES", held, raising=False)
        got = attend(q, k, v, kind, 16**-0.5)[0].double()
        assert torch.allclose(got, wanted, atol=1e-5)
        dead = [query for query in range(20) if not row.keep[query // 4]]
        assert bool((got[:, dead] == 0).all())
