"""Labels, weights and anchors against slow loops, on generated rows, and the chances of anchors by counting.

Run: python -m pytest tests/trainer/oracles/test_objective_oracle.py
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as some
from slow_rules import Layout, dpace, layout, may_start, slot_weight
from torch import Tensor

from trainer import config as configs
from trainer.data.anchors import needed_width, valid_anchors
from trainer.data.packing import Document, Rows, pack
from trainer.training.objective import choose_anchors, dpace_weights, draw, make_blocks


def rows_of(layouts: list[Layout]) -> Rows:
    """Rows whose tokens tell where they are: 1000 * row + place + 2."""
    size = len(layouts[0].documents)
    tokens = torch.arange(size)[None] + 1000 * torch.arange(len(layouts))[:, None] + 2
    documents, positions, supervised = (
        torch.tensor([getattr(row, name) for row in layouts])
        for name in ("documents", "positions", "supervised")
    )
    return Rows(tokens, documents, positions, supervised)


SHAPES = some.lists(some.integers(1, 12), min_size=1, max_size=5)


@seed(20260802)
@settings(max_examples=60, deadline=None, database=None)
@given(
    lengths=SHAPES,
    blocks=some.integers(1, 6),
    size_gamma=some.sampled_from([(16, 7.0), (10, 5.0), (8, 4.0), (3, 1.5)]),
    number=some.integers(0, 10**6),
)
def test_labels_and_weights_of_any_layout(
    lengths: list[int], blocks: int, size_gamma: tuple[int, float], number: int
) -> None:
    """Holes in the loss mask, ends of documents, the end of the row, dead blocks."""
    block_size, gamma = size_gamma
    layouts = [layout(lengths, blocks, number), layout(lengths, blocks, number + 1)]
    rows = rows_of(layouts)
    anchors, keep = (torch.tensor([getattr(row, name) for row in layouts]) for name in ("anchors", "keep"))
    made = make_blocks(rows, anchors, keep, block_size, gamma, mask_token_id=1)
    for r, row in enumerate(layouts):
        for block, anchor in enumerate(row.anchors):
            own = slice(block * block_size, (block + 1) * block_size)
            if row.keep[block]:
                assert made.tokens[r, own].tolist() == [1000 * r + anchor + 2] + [1] * (block_size - 1)
            first = row.positions[anchor]
            assert made.positions[r, own].tolist() == [first + slot for slot in range(block_size)]
            for slot in range(1, block_size):
                wanted = slot_weight(row, block, slot, gamma)
                assert made.weights[r, block, slot - 1].item() == pytest.approx(wanted, rel=1e-6)
                assert bool(made.supervised[r, block, slot - 1]) == (wanted > 0)
                if wanted:
                    assert made.labels[r, block, slot - 1] == 1000 * r + anchor + slot + 2


def test_gamma_follows_the_block_size() -> None:
    def gamma(size: int) -> float:
        section = {"target": {"path": "x"}, "drafter": {"mask_token_id": 1, "block_size": size}}
        return configs.load(section).gamma

    assert [gamma(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert configs.check({"target": {"path": "x"}, "drafter": {"mask_token_id": 1, "block_size": 12}}) != []


def test_labels_never_come_from_padding_or_another_document() -> None:
    """Documents end at 5 and 9; padding, although a document by number, starts nothing and labels nothing."""
    rows = pack([Document([10, 11, 12, 13, 14], [True] * 5), Document([20, 21, 22, 23], [True] * 4)], 12)
    assert valid_anchors(rows)[0].nonzero()[:, 0].tolist() == [1, 2, 3, 6, 7]
    made = make_blocks(rows, torch.tensor([[3, 7]]), torch.tensor([[True, True]]), 4, 4.0, 1)
    assert made.supervised[0].tolist() == [[True, False, False], [True, False, False]]
    assert made.labels[0].tolist() == [[14, 0, 0], [23, 0, 0]]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_by_its_definition(alpha: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for count in range(1, 8):
        confidence = torch.rand(6, count, generator=generator, dtype=torch.float64)
        given_labels = torch.rand(6, count, generator=generator) < 0.7
        got = dpace_weights(confidence, given_labels, alpha)
        for block in range(6):
            wanted = dpace(confidence[block].tolist(), given_labels[block].tolist(), alpha)
            assert got[block].tolist() == pytest.approx(wanted, rel=1e-12)


# --- anchors ---


@seed(20260803)
@settings(max_examples=60, deadline=None, database=None)
@given(lengths=SHAPES, cap=some.integers(1, 8), number=some.integers(0, 10**6))
def test_every_document_gets_the_smaller_of_cap_and_its_valid_anchors(
    lengths: list[int], cap: int, number: int
) -> None:
    layouts = [layout(lengths, 1, number), layout(lengths, 1, number + 1)]
    rows = rows_of(layouts)
    width = needed_width(rows, cap)
    anchors, keep = choose_anchors(rows, draw(tuple(rows.tokens.shape), 0, number, 0), cap, width)
    most = 0
    for r, row in enumerate(layouts):
        good = [place for place in range(len(row.documents)) if may_start(row, place)]
        taken = anchors[r][keep[r]].tolist()
        assert taken == sorted(set(taken)) and set(taken) <= set(good)
        valid = Counter(row.documents[place] for place in good)
        got = Counter(row.documents[place] for place in taken)
        assert got == {document: min(cap, count) for document, count in valid.items()}
        most = max(most, len(taken))
    assert width == max(1, most)


def test_every_subset_of_anchors_is_as_likely_as_any_other() -> None:
    """Two documents of 7 valid anchors each, 3 drawn from each: 35 subsets, in 7,000 draws about 200 each.

    Chi-square with 34 degrees of freedom: above 65.2 in one of a thousand. The two documents' draws must also
    be independent of each other: "has its first anchor", two by two, is above 16.3 in one of a thousand.
    """
    rows = pack([Document([5] * 9, [True] * 9)] * 2, 18)
    good = [list(range(1, 8)), list(range(10, 17))]
    assert valid_anchors(rows)[0].nonzero()[:, 0].tolist() == good[0] + good[1]
    draws = 7000
    many = Rows(*(part.expand(draws, -1) for part in rows.parts()))
    anchors, keep = choose_anchors(many, draw((draws, 18), 3, 0, 0), 3, 6)
    assert bool(keep.all())
    for document in (0, 1):
        drawn = Counter(tuple(each) for each in anchors[:, 3 * document : 3 * document + 3].tolist())
        subsets = list(itertools.combinations(good[document], 3))
        assert set(drawn) == set(subsets)
        expected = draws / len(subsets)
        assert sum((drawn[each] - expected) ** 2 / expected for each in subsets) < 65.2
    table = Counter((1 in row[:3], 10 in row[3:]) for row in anchors.tolist())
    share = 3 / 7
    chi_square = sum(
        (table[a, b] - draws * pa * pb) ** 2 / (draws * pa * pb)
        for (a, pa), (b, pb) in itertools.product(((True, share), (False, 1 - share)), repeat=2)
    )
    assert chi_square < 16.3  # three degrees of freedom, for the shares are given


def test_draws_of_batches_and_replays_are_not_related() -> None:
    numbers = [draw((1, 2000), s, b, r)[0] for s, b, r in itertools.product((0, 1), (0, 1), (0, 1))]
    for one, other in itertools.combinations(numbers, 2):
        correlation = float(torch.corrcoef(torch.stack((one, other)))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(2000)
    # (1, 11, 0) and (11, 1, 0), (1, 1, 10) ... must not meet by writing the numbers side by side
    assert not torch.equal(draw((1, 9), 1, 11, 0), draw((1, 9), 11, 1, 0))


def test_a_draw_is_always_the_same_and_leaves_other_random_numbers_alone() -> None:
    """Numbers written down once: a run resumed by another process, machine or version goes on the same."""
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    drawn = draw((2, 3), 42, 17, 3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert drawn.tolist() == [
        [0.7781650105119899, 0.6412556860278039, 0.7884991114971586],
        [0.3206591552147319, 0.09409240190072765, 0.9984061631761227],
    ]


def test_anchors_do_not_depend_on_how_a_batch_is_cut() -> None:
    rows = rows_of([layout([20, 9, 3], 1, number) for number in range(6)])
    uniform = draw((6, 32), 1, 2, 3)
    anchors, keep = choose_anchors(rows, uniform, 4, 12)
    for cuts in ([2, 2, 2], [1, 5], [3, 3], [1] * 6):
        start, parts = 0, []
        for count in cuts:
            part = slice(start, start + count)
            parts.append(choose_anchors(rows[part], uniform[part], 4, 12))
            start += count
        assert torch.equal(torch.cat([part[0] for part in parts]), anchors)
        assert torch.equal(torch.cat([part[1] for part in parts]), keep)


def test_shapes_do_not_depend_on_the_data() -> None:
    """The step's functions run where values do not exist (meta tensors): nothing can be read back."""

    def meta(dtype: torch.dtype) -> Tensor:
        return torch.empty(3, 48, dtype=dtype, device="meta")

    rows = Rows(meta(torch.int64), meta(torch.int64), meta(torch.int64), meta(torch.bool))
    anchors, keep = choose_anchors(rows, meta(torch.float64), 4, 10)
    made = make_blocks(rows, anchors, keep, 8, 4.0, 1)
    assert made.tokens.shape == (3, 80) and made.weights.shape == (3, 10, 7)
