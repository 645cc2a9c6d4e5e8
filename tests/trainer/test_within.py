"""The target's mask of packed rows: elements and tiles against torch's own, which asks about every pair.

Run: python -m pytest tests/trainer/test_within.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, seed, settings
from hypothesis import strategies as some
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from trainer.model.flex import flex_capped, flex_within
from trainer.model.tiles import TILE, tile_map_within
from trainer.model.within import dense_within, first_seen

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def documents(rows: int, size: int, longest: int, number: int) -> Tensor:
    """[rows, size] of random lengths; every third case has a document begin with each tile."""
    generator = torch.Generator().manual_seed(number)
    new = torch.rand(rows, size, generator=generator) < 2 / (1 + longest)
    new[:, :: TILE if number % 3 == 0 else size] = True
    return new.long().cumsum(1) - 1


def asked(numbers: Tensor, window: int | None) -> Callable[..., Tensor]:
    """The rule for one query and one key, without intervals."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (numbers[row, query] == numbers[row, key]) & (key <= query)
        return seen if window is None else seen & (query - key < window)

    return sees


@seed(20261130)
@settings(max_examples=40, deadline=None, database=None)
@given(
    rows=some.integers(1, 2),
    size=some.integers(1, 700),
    window=some.one_of(some.none(), some.integers(1, 400)),
    longest=some.sampled_from([1, 20, 200, 2000]),
    number=some.integers(0, 10**6),
)
@example(rows=1, size=1, window=None, longest=1, number=0)
@example(rows=2, size=640, window=None, longest=5000, number=2)  # whole tiles
@example(rows=2, size=640, window=300, longest=5000, number=2)  # and tiles before the window
@example(rows=2, size=512, window=128, longest=5000, number=2)  # a window that is a tile
def test_tiles_and_elements_equal_those_of_a_mask_that_was_asked_everywhere(
    rows: int, size: int, window: int | None, longest: int, number: int
) -> None:
    numbers = documents(rows, size, longest, number)
    rule, first = asked(numbers, window), first_seen(numbers, window)
    # torch's own would ask about keys behind the row's end, where numbers has nothing.
    wanted = create_block_mask(
        lambda b, h, q, k: rule(b, h, q.clamp(max=size - 1), k.clamp(max=size - 1)),
        rows,
        None,
        size,
        size,
        device="cpu",
        BLOCK_SIZE=TILE,
    )
    got = flex_within(first)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, others = getattr(got, f"{name}_num_blocks"), getattr(wanted, f"{name}_num_blocks")
        assert torch.equal(counts, others), name
        indices, others = getattr(got, f"{name}_indices"), getattr(wanted, f"{name}_indices")
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[listed], others[listed]), name
    row, token = torch.arange(rows), torch.arange(size)
    index = row[:, None, None], torch.tensor(0), token[None, :, None], token[None, None, :]
    assert torch.equal(got.mask_mod(*index), rule(*index))
    assert torch.equal(dense_within(first)[:, 0], rule(*index))


def test_the_examples_reach_every_kind_of_tile() -> None:
    """Whole, partly seen and empty tiles; of a long document, whole ones below the diagonal."""
    for window in (None, 300):
        partly, whole = tile_map_within(first_seen(documents(2, 640, 5000, 2), window))
        assert partly.any() and whole.any() and not (partly & whole).any()
        assert not (partly | whole)[:, 0, 1:].any()
    partly, whole = tile_map_within(first_seen(torch.zeros(1, 384, dtype=torch.int64), None))
    assert partly[0].tolist() == torch.eye(3, dtype=torch.bool).tolist()
    assert whole[0].tolist() == [[False] * 3, [True, False, False], [True, True, False]]
    # Window 129: query 256 reaches to key 128, query 383 to key 255; no tile is seen whole.
    partly, whole = tile_map_within(first_seen(torch.zeros(1, 384, dtype=torch.int64), 129))
    assert partly[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]] and not whole.any()


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_under_the_mask(window: int | None, cap: float | None) -> None:
    """Against the dense mask; capped scores against attention written out."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(2, 4, 300, 16, generator=generator)
    k, v = (torch.randn(2, 2, 300, 16, generator=generator) for _ in range(2))
    first = first_seen(documents(2, 300, 200, 5), window)
    got = flex_capped(q, k, v, flex_within(first), 0.3, cap)
    k, v = (part.repeat_interleave(2, 1) for part in (k, v))
    scores = 0.3 * q @ k.mT
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    wanted = scores.masked_fill(~dense_within(first), -torch.inf).softmax(-1) @ v
    assert torch.allclose(got, wanted, atol=1e-5)
    if cap is None:
        dense = scaled_dot_product_attention(q, k, v, attn_mask=dense_within(first), scale=0.3)
        assert torch.allclose(got, dense, atol=1e-5)


def test_the_tile_map_compiles_once_for_all_batches() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(tile_map_within, backend=counter, dynamic=False, fullgraph=True)
    for number in range(3):
        first = first_seen(documents(2, 512, 200, number), 300)
        assert all(torch.equal(*pair) for pair in zip(compiled(first), tile_map_within(first), strict=True))
    assert counter.frame_count == 1


def test_equal_numbers_apart_are_two_documents() -> None:
    """Only neighbours are compared: numbers may come again along a row."""
    assert first_seen(torch.tensor([[0, 0, 1, 0, 0]]), None).tolist() == [[0, 0, 2, 3, 3]]
    assert first_seen(torch.tensor([[0, 0, 0, 0, 5]]), 2).tolist() == [[0, 0, 1, 2, 4]]
