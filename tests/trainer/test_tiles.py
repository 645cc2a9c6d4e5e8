"""The block mask of flex attention, made by arithmetic: against torch's own, which asks an element-wise rule
about every query and key; and attention under it, gradients included, against the dense mask.

Run: python -m pytest tests/trainer/test_tiles.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, seed, settings
from hypothesis import strategies as some
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.drafter import attend
from trainer.model.flex import flex_mask
from trainer.model.mask import Bounds, bounds, dense_mask
from trainer.model.tiles import TILE, tile_map

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Case:
    """Packed rows, and blocks at rising anchors of which some are dead: the last, as in training, or any."""

    def __init__(self, rows: int, size: int, blocks: int, longest: int, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        new = torch.rand(rows, size, generator=generator) < 2 / (1 + longest)
        new[:, :: TILE if number % 3 == 0 else size] = (
            True  # documents that begin with a tile; or just the first
        )
        index = torch.arange(size).expand(rows, size)
        self.documents = new.long().cumsum(1) - 1
        self.doc_start = torch.where(new, index, 0).cummax(1).values
        self.anchors = torch.stack(
            [torch.randint(size, (blocks,), generator=generator).sort().values for _ in range(rows)]
        )
        share = 1.5 * torch.rand(rows, 1, generator=generator)  # a third of the rows have no dead block
        alive = torch.rand(rows, blocks, generator=generator) < share
        self.keep = alive if number % 2 else alive.sort(1, descending=True).values

    def rule(self, block_size: int, window: int | None) -> Bounds:
        return bounds(self.anchors, self.keep, self.doc_start, block_size, window)

    def asked(self, block_size: int, window: int | None) -> Callable[..., Tensor]:
        """The contract for one query and one key, without intervals."""
        size = self.documents.shape[1]

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, slot = query // block_size, query % block_size
            anchor, token = self.anchors[row, block], key.clamp(max=size - 1)
            same_document = self.documents[row, token] == self.documents[row, anchor]
            context = (key < size) & (key < anchor) & same_document
            own = (key >= size) & ((key - size) // block_size == block)
            if window is not None:
                context = context & (anchor + slot - key < window)
                own = own & ((key - size) % block_size <= slot)
            return (context | own) & self.keep[row, block]

        return sees


@seed(20260804)
@settings(max_examples=40, deadline=None, database=None)
@given(
    rows=some.integers(1, 2),
    size=some.integers(1, 700),
    blocks=some.integers(1, 60),
    block_size=some.sampled_from([2, 5, 8, 10, 16]),
    window=some.one_of(some.none(), some.integers(1, 400)),
    longest=some.sampled_from([1, 20, 200, 2000]),
    number=some.integers(0, 10**6),
)
@example(rows=1, size=1, blocks=1, block_size=2, window=None, longest=1, number=0)
@example(rows=1, size=300, blocks=9, block_size=64, window=70, longest=90, number=4)
@example(rows=2, size=640, blocks=60, block_size=16, window=None, longest=5000, number=2)  # whole tiles
@example(rows=2, size=640, blocks=60, block_size=16, window=300, longest=5000, number=8)
@example(rows=1, size=256, blocks=4, block_size=300, window=None, longest=90, number=1)  # long blocks
def test_tiles_and_elements_equal_those_of_a_mask_that_was_asked_everywhere(
    rows: int, size: int, blocks: int, block_size: int, window: int | None, longest: int, number: int
) -> None:
    case = Case(rows, size, blocks, longest, number)
    queries = blocks * block_size
    rule, asked = case.rule(block_size, window), case.asked(block_size, window)
    wanted = create_block_mask(asked, rows, None, queries, size + queries, device="cpu", BLOCK_SIZE=TILE)
    got = flex_mask(rule)
    for name in ("kv", "full_kv", "q", "full_q"):
        numbers, other = getattr(got, f"{name}_num_blocks"), getattr(wanted, f"{name}_num_blocks")
        assert torch.equal(numbers, other), name
        indices, others = getattr(got, f"{name}_indices"), getattr(wanted, f"{name}_indices")
        listed = torch.arange(indices.shape[-1]) < numbers[..., None]
        assert torch.equal(indices[listed], others[listed]), name
    row, query, key = torch.arange(rows), torch.arange(queries), torch.arange(size + queries)
    index = row[:, None, None], torch.tensor(0), query[None, :, None], key[None, None, :]
    assert torch.equal(got.mask_mod(*index), asked(*index))
    assert torch.equal(dense_mask(rule)[:, 0], asked(*index))


def test_the_examples_reach_every_kind_of_tile() -> None:
    """Whole, partly seen and empty tiles, in full and in sliding layers; empty ones between touched ones."""
    for window, number in ((None, 2), (300, 8)):
        partly, whole = tile_map(Case(2, 640, 60, 5000, number).rule(16, window))
        assert partly.any() and whole.any() and not (partly | whole).all() and not (partly & whole).any()
    # Two blocks of one tile of queries, at tokens 10 and 610 of two documents: tiles 1 to 3 are empty.
    rule = bounds(
        torch.tensor([[10, 610]]),
        torch.tensor([[True, True]]),
        torch.where(torch.arange(640) < 600, 0, 600)[None],
        16,
        None,
    )
    partly, whole = tile_map(rule)
    assert partly.int().tolist() == [[[1, 0, 0, 0, 1, 1]]] and not whole.any()


def test_ends_of_intervals_that_are_ends_of_tiles() -> None:
    """384 tokens: an anchor at a tile's first token does not touch that tile; a document that begins with one
    touches none before.
    """
    for anchors, begins, touched in (
        ([128, 256], 0, [1, 1, 0, 1]),
        ([128, 128], 0, [1, 0, 0, 1]),
        ([200, 210], 128, [0, 1, 0, 1]),
    ):
        starts = torch.where(torch.arange(384) < begins, 0, begins)[None]
        rule = bounds(torch.tensor([anchors]), torch.tensor([[True, True]]), starts, 16, None)
        partly, whole = tile_map(rule)
        assert partly.int().tolist() == [[touched]] and not whole.any()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return out


@pytest.mark.parametrize("anchors", [512, 6144])
@pytest.mark.parametrize("window", [None, 2048])
def test_the_size_of_a_batch_is_just_a_number(anchors: int, window: int | None) -> None:
    """49,152 tokens, as shapes without values: nothing is read back, nothing as large as queries x keys."""
    size, queries = 49_152, anchors * 16
    with FakeTensorMode(), Largest() as largest:
        index = torch.zeros(1, anchors, dtype=torch.int64)
        rule = bounds(index, index.bool(), torch.zeros(1, size, dtype=torch.int64), 16, window)
        made = flex_mask(rule)
    assert made.shape == (1, 1, queries, size + queries)
    assert made.kv_num_blocks.shape == (1, 1, queries // TILE)
    assert 0 < largest.elements <= queries * size // TILE


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has flex attention's backward in plain operations for the CPU too, but lets nobody call it."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def random_case(dtype: torch.dtype) -> tuple[Case, list[Tensor]]:
    case = Case(2, 300, 20, 90, 5)
    assert not case.keep.all() and case.keep.any(1).all()
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 160, 16), (2, 2, 460, 16), (2, 2, 460, 16))
    return case, [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def out_and_gradients(mask: Any, inputs: list[Tensor]) -> list[Tensor]:
    out = attend(*inputs, mask, 0.25)
    mix = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * mix).sum(), inputs)]


@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_attention_and_gradients_equal_by_every_path(
    window: int | None, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, inputs = random_case(dtype)
    rule = case.rule(8, window)
    wanted = out_and_gradients(dense_mask(rule), inputs)
    assert wanted[0].abs().max() > 1
    others = {"flex": out_and_gradients(flex_mask(rule), inputs)}
    monkeypatch.setattr("trainer.model.drafter.MOST_SCORES", 0)
    others["fused"] = out_and_gradients(dense_mask(rule), inputs)
    for path, got in others.items():
        for one, other in zip(got, wanted, strict=True):
            assert (one - other).abs().max() / other.abs().max() < tolerance, path


@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize("path", ["products", "fused", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dead_blocks_get_zeros_and_give_no_gradient(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, inputs = random_case(dtype)
    monkeypatch.setattr("trainer.model.drafter.MOST_SCORES", 1 << 26 if path == "products" else 0)
    rule = case.rule(8, None)
    mask = flex_mask(rule) if path == "flex" else dense_mask(rule)
    out, *gradients = out_and_gradients(mask, inputs)
    dead = ~rule.alive[:, None, :, None].expand_as(out)
    assert dead.any() and bool((out[dead] == 0).all()) and bool((out[~dead] != 0).all())
    assert bool((gradients[0][dead] == 0).all())
    for gradient in gradients:
        assert bool(gradient.isfinite().all()) and gradient.abs().max() > 0
    # Their own keys and values are seen by nobody, and no key gets a gradient from a dead query.
    own = ~rule.alive[:, None, :, None].expand(-1, 2, -1, 16)
    for gradient in gradients[1:]:
        assert bool((gradient[:, :, 300:][own] == 0).all())


def test_dead_blocks_do_not_depend_on_what_a_kernel_makes_of_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some divide zero by zero there, and the NaN would spread to every weight."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float, enable_gqa: bool
    ) -> Tensor:
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        return (scale * q @ k.mT).masked_fill(~attn_mask, -torch.inf).softmax(-1) @ v

    case, inputs = random_case(torch.float64)
    mask = dense_mask(case.rule(8, None))
    wanted = out_and_gradients(mask, inputs)
    monkeypatch.setattr("trainer.model.drafter.MOST_SCORES", 0)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    for got, other in zip(out_and_gradients(mask, inputs), wanted, strict=True):
        assert torch.allclose(got, other, atol=1e-12)


@pytest.mark.usefixtures("backward_on_cpu")
def test_all_blocks_dead() -> None:
    case, inputs = random_case(torch.float32)
    case.keep = torch.zeros_like(case.keep)
    for mask in (dense_mask(case.rule(8, None)), flex_mask(case.rule(8, None))):
        for part in out_and_gradients(mask, inputs):
            assert bool((part == 0).all())


def test_tile_map_and_attention_compile_once_for_all_batches() -> None:
    """As the GPU path compiles them, with a compiler that only counts: no break, no second compilation."""
    torch._dynamo.reset()
    maps, attentions = CompileCounter(), CompileCounter()
    mapped = torch.compile(tile_map, backend=maps, dynamic=False, fullgraph=True)
    attended = torch.compile(flex_attention, backend=attentions, dynamic=False, fullgraph=True)
    for number in range(3):
        case = Case(1, 256, 16, 60, number)
        rule = case.rule(8, None)
        assert all(torch.equal(*pair) for pair in zip(mapped(rule), tile_map(rule), strict=True))
        generator = torch.Generator().manual_seed(number)
        q, k, v = (torch.randn(1, 2, size, 16, generator=generator) for size in (128, 384, 384))
        got = attended(q, k, v, block_mask=flex_mask(rule), scale=0.25)
        assert torch.allclose(got, attend(q, k, v, dense_mask(rule), 0.25), atol=1e-5)
    assert (maps.frame_count, attentions.frame_count) == (1, 1)
