"""The drafter's mask against a reference that asks about one query and one key at a time.

Run: python -m pytest tests/trainer/test_mask.py
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from trainer.model.flex import flex_mask
from trainer.model.mask import bounds, dense_mask, mask_mod


def may_see(anchors, keep, documents, block_size, window, query, key, row_tokens) -> bool:
    """The rule, as a person would say it."""
    block, slot = divmod(query, block_size)
    if not keep[block]:
        return False
    anchor = anchors[block]
    if key < row_tokens:  # a context token
        if documents[key] != documents[anchor] or key >= anchor:
            return False
        return window is None or key > anchor + slot - window
    other, other_slot = divmod(key - row_tokens, block_size)
    if other != block:
        return False
    return window is None or other_slot <= slot


def reference(anchors, keep, documents, block_size, window) -> Tensor:
    rows, row_tokens = documents.shape
    queries = anchors.shape[1] * block_size
    out = torch.zeros(rows, 1, queries, row_tokens + queries, dtype=torch.bool)
    for row in range(rows):
        lists = anchors[row].tolist(), keep[row].tolist(), documents[row].tolist()
        for query in range(queries):
            for key in range(row_tokens + queries):
                out[row, 0, query, key] = may_see(*lists, block_size, window, query, key, row_tokens)
    return out


def packed(seed: int, row_tokens: int = 40, blocks: int = 6):
    """Random documents, and random anchors of which some are dead."""
    chance = random.Random(seed)
    documents, starts = [], []
    while len(documents) < row_tokens:
        length = chance.randrange(1, 15)
        starts += [len(documents)] * length
        documents += [documents[-1] + 1 if documents else 0] * length
    anchors = sorted(chance.sample(range(row_tokens), blocks))
    keep = [chance.random() < 0.7 for _ in anchors]
    return anchors, keep, documents[:row_tokens], starts[:row_tokens]


def two_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = zip(packed(seed), packed(seed + 1000), strict=True)
    anchors, keep, documents, starts = (torch.tensor(list(column)) for column in columns)
    return anchors, keep, documents, starts


@pytest.mark.parametrize("window", [None, 5, 12])
@pytest.mark.parametrize("seed", range(4))
def test_dense_and_flex_rules_equal_the_reference_element_by_element(seed: int, window: int | None) -> None:
    anchors, keep, documents, starts = two_rows(seed)
    rule = bounds(anchors, keep, starts, 4, window)
    wanted = reference(anchors, keep, documents, 4, window)
    assert wanted.any() and not wanted.all()
    assert torch.equal(dense_mask(rule), wanted)
    row, query, key = (torch.arange(size) for size in (2, *wanted.shape[2:]))
    visible = mask_mod(rule)
    by_rule = visible(row[:, None, None], torch.tensor(0), query[None, :, None], key[None, None, :])
    assert torch.equal(by_rule, wanted[:, 0])


@pytest.mark.parametrize("window", [None, 40])
def test_the_block_mask_of_flex_attention_names_the_same_tiles(window: int | None) -> None:
    """Tiles of 128 x 128: present where the dense mask has anything."""
    anchors, keep, _, starts = (torch.tensor([part]) for part in packed(7, row_tokens=384, blocks=64))
    rule = bounds(anchors, keep, starts, 4, window)
    tiles = flex_mask(rule).to_dense().bool()
    dense = dense_mask(rule)
    assert tiles.shape == (1, 1, 2, 5)
    wanted = dense.unflatten(3, (5, 128)).unflatten(2, (2, 128)).any(3).any(4)
    assert torch.equal(tiles, wanted)
    assert not wanted.all()


def test_blocks_whose_anchors_are_neighbours_do_not_see_each_other() -> None:
    anchors, keep = torch.tensor([[10, 11]]), torch.tensor([[True, True]])
    for window in (None, 8):
        mask = dense_mask(bounds(anchors, keep, torch.zeros(1, 20, dtype=torch.int64), 4, window))[0, 0]
        first, second = mask[:4, 20:], mask[4:, 20:]
        assert not first[:, 4:].any() and not second[:, :4].any()
        assert mask[:4, 10:20].sum() == 0  # strictly before the anchor: not even the anchor's own state
        assert mask[4:, 11:20].sum() == 0


def test_dead_blocks_see_nothing_and_are_seen_by_nobody() -> None:
    anchors, keep = torch.tensor([[5, 9, 0]]), torch.tensor([[True, True, False]])
    mask = dense_mask(bounds(anchors, keep, torch.zeros(1, 12, dtype=torch.int64), 4, None))[0, 0]
    assert not mask[8:].any() and not mask[:, 12 + 8 :].any()
