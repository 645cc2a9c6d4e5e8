"""Anchors, labels and weights against slow loops that a reader can check by eye.

Run: python -m pytest tests/trainer/test_objective.py
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from trainer.data.anchors import needed_width, valid_anchors
from trainer.data.packing import Document, Rows, pack
from trainer.training.objective import choose_anchors, dpace_weights, draw, make_blocks

BLOCK, GAMMA, MASK = 5, 4.0, 1


def some_rows(seed: int = 0, row_tokens: int = 32) -> Rows:
    chance = random.Random(seed)
    documents = [
        Document([chance.randrange(2, 90) for _ in range(size)], [chance.random() < 0.7 for _ in range(size)])
        for size in (chance.randrange(1, row_tokens) for _ in range(9))
    ]
    return pack(documents, row_tokens)


def slow_valid(rows: Rows, row: int) -> list[int]:
    tokens, documents, positions, supervised = (part[row].tolist() for part in rows.parts())
    return [
        place
        for place in range(len(tokens) - 1)
        if supervised[place]
        and supervised[place + 1]
        and documents[place] == documents[place + 1]
        and positions[place] >= 1
    ]


def test_valid_anchors_equal_the_slow_loop() -> None:
    rows = some_rows()
    for row in range(len(rows)):
        assert valid_anchors(rows)[row].nonzero()[:, 0].tolist() == slow_valid(rows, row)


@pytest.mark.parametrize("seed", range(3))
def test_labels_and_weights_equal_the_slow_loop(seed: int) -> None:
    rows = some_rows(seed)
    shape = (len(rows), rows.tokens.shape[1])
    anchors, keep = choose_anchors(rows, draw(shape, 0, seed, 0), 4, 10)
    blocks = make_blocks(rows, anchors, keep, BLOCK, GAMMA, MASK)
    alive = 0
    for row in range(len(rows)):
        tokens, documents, positions, supervised = (part[row].tolist() for part in rows.parts())
        for block, anchor in enumerate(anchors[row].tolist()):
            for slot in range(1, BLOCK):
                place = anchor + slot
                weight = 0.0
                if (
                    keep[row, block]
                    and place < len(tokens)
                    and documents[place] == documents[anchor]
                    and supervised[place]
                ):
                    weight = math.exp(-(slot - 1) / GAMMA)
                    alive += 1
                    assert blocks.labels[row, block, slot - 1] == tokens[place]
                assert blocks.weights[row, block, slot - 1].item() == pytest.approx(weight)
                assert bool(blocks.supervised[row, block, slot - 1]) is (weight > 0)
            own = slice(block * BLOCK, (block + 1) * BLOCK)
            if keep[row, block]:
                assert blocks.tokens[row, own].tolist() == [tokens[anchor], *[MASK] * (BLOCK - 1)]
                first = positions[anchor]
                assert blocks.positions[row, own].tolist() == list(range(first, first + BLOCK))
    assert alive > 50


@pytest.mark.parametrize("per_document", [1, 3, 100])
def test_every_document_gets_its_share_without_repeats(per_document: int) -> None:
    rows = some_rows(3)
    width = needed_width(rows, per_document)
    shape = (len(rows), rows.tokens.shape[1])
    anchors, keep = choose_anchors(rows, draw(shape, 5, 0, 0), per_document, width)
    assert anchors.shape == keep.shape == (len(rows), width)
    widest = 0
    for row in range(len(rows)):
        taken = anchors[row][keep[row]].tolist()
        assert taken == sorted(set(taken))
        valid = slow_valid(rows, row)
        assert set(taken) <= set(valid)
        numbers = rows.documents[row]
        wanted = {
            document: min(per_document, count) for document, count in Counter(numbers[valid].tolist()).items()
        }
        assert Counter(numbers[taken].tolist()) == wanted
        widest = max(widest, len(taken))
    assert widest == max(width, 0) or (width == 1 and widest == 0)


def test_when_the_width_is_short_documents_give_up_evenly() -> None:
    documents = [Document([7] * size, [True] * size) for size in (20, 4, 4)]
    rows = pack(documents, 28)
    shape = (1, 28)
    for number in range(20):
        anchors, keep = choose_anchors(rows, draw(shape, 0, number, 0), 100, 6)
        shares = Counter(rows.documents[0][anchors[0][keep[0]]].tolist())
        assert shares == {0: 2, 1: 2, 2: 2}


def test_anchors_are_uniform_and_depend_on_seed_batch_and_replay_alone() -> None:
    rows = pack([Document([7] * 24, [True] * 24)], 24)
    counts: Counter[int] = Counter()
    draws = 4000
    for number in range(draws):
        anchors, keep = choose_anchors(rows, draw((1, 24), 1, number, 0), 4, 4)
        assert keep.all()
        counts.update(anchors[0].tolist())
    valid = slow_valid(rows, 0)
    assert set(counts) == set(valid) == set(range(1, 23))
    expected = draws * 4 / len(valid)
    chi_square = sum((counts[place] - expected) ** 2 / expected for place in valid)
    assert chi_square < 50  # 21 degrees of freedom: a value above 46.8 has one chance in a thousand
    assert torch.equal(draw((1, 24), 1, 2, 3), draw((1, 24), 1, 2, 3))
    others = [draw((1, 24), *key) for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert not any(torch.equal(draw((1, 24), 1, 2, 3), other) for other in others)


def test_a_row_without_valid_anchors_has_only_dead_blocks() -> None:
    rows = pack([Document([5, 6, 7], [False] * 3)], 8)
    anchors, keep = choose_anchors(rows, draw((1, 8), 0, 0, 0), 4, 3)
    blocks = make_blocks(rows, anchors, keep, BLOCK, GAMMA, MASK)
    assert not keep.any() and not blocks.supervised.any() and blocks.weights.sum() == 0
    assert anchors.shape == (1, 3) and set(blocks.tokens[0].tolist()) == {MASK}


def test_the_width_may_exceed_the_row() -> None:
    rows = pack([Document([5] * 8, [True] * 8)], 8)
    anchors, keep = choose_anchors(rows, draw((1, 8), 0, 0, 0), 100, 16)
    assert anchors.shape == (1, 16) and int(keep.sum()) == 6


def test_dpace_weights_equal_the_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(7, 4, generator=generator)
    supervised = torch.rand(7, 4, generator=generator) < 0.8
    alpha = 0.3
    got = dpace_weights(confidence, supervised, alpha)
    for block in range(7):
        reach, products = 1.0, []
        for slot in range(4):
            if supervised[block, slot]:
                reach *= (1 - alpha) * confidence[block, slot].item() + alpha
                products.append(reach)
            else:
                products.append(0.0)
        for slot in range(4):
            wanted = sum(products[slot:]) if supervised[block, slot] else 0.0
            assert got[block, slot].item() == pytest.approx(wanted, rel=1e-5)
    assert not got.requires_grad


def test_dpace_is_the_gradient_of_the_expected_accepted_length() -> None:
    """With alpha 0, weight * d(cross-entropy) is what the expected accepted length itself would ask for."""
    logit = torch.randn(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    probability = logit.sigmoid()
    probability.cumprod(-1).sum().backward()
    wanted, logit.grad = logit.grad, None
    weights = dpace_weights(probability, torch.ones(3, 5, dtype=torch.bool), 0.0)
    (weights * logit.sigmoid().log()).sum().backward()
    assert torch.allclose(logit.grad, wanted)
