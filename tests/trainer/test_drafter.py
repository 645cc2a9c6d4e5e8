"""Training's one big forward pass against step-by-step inference, and what a block must not depend on.

Run: python -m pytest tests/trainer/test_drafter.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from trainer.data.packing import Document, Rows, pack
from trainer.model.cache import DraftContext
from trainer.model.drafter import Drafter
from trainer.model.mask import bounds, dense_mask

LAYERS = {
    "full": ("full_attention", "full_attention"),
    "sliding": ("sliding_attention", "sliding_attention"),
    "mixed": ("sliding_attention", "full_attention", "sliding_attention"),
}
BLOCK = 4


def three_documents(row_tokens: int = 40) -> Rows:
    """One row: documents of 17, 11 and 8 tokens, then padding."""
    return pack([Document(list(range(2, 2 + size)), [True] * size) for size in (17, 11, 8)], row_tokens)


def training_forward(
    drafter: Drafter, rows: Rows, taps: Tensor, x: Tensor, anchors: Sequence[int], keep: Sequence[bool]
) -> Tensor:
    """[N, B, H] as in training: all blocks of the row at once. x: [N, B, H]."""
    places, alive = torch.tensor([list(anchors)]), torch.tensor([list(keep)])
    masks = [
        dense_mask(bounds(places, alive, rows.doc_start, BLOCK, drafter.config.window(layer)))
        for layer in range(len(drafter.layers))
    ]
    first = rows.positions.gather(1, places)[:, :, None]
    positions = (first + torch.arange(BLOCK)).flatten(1)
    context = drafter.context_keys_values(taps, rows.positions)
    out = drafter(x.flatten(0, 1)[None], positions, context, masks)
    return out.view(len(anchors), BLOCK, -1)


def cached_inference(drafter: Drafter, taps: Tensor, x: Tensor, start: int, steps: Sequence[int]) -> Tensor:
    """[B, H] as when decoding one document: its states arrive in pieces, are cached, then the block is
    drafted.

    taps: [1, T, K * H] of the document alone; steps: how many states arrive at a time, summing to `start`.
    """
    context = DraftContext(len(drafter.layers))
    done = 0
    for count in steps:
        positions = torch.arange(done, done + count)[None]
        new = drafter.context_keys_values(taps[:, done : done + count], positions)
        context.append(new, positions, torch.ones_like(positions, dtype=torch.bool))
        done += count
    assert done == start
    at = torch.tensor([start])
    masks = [context.mask(at, BLOCK, drafter.config.window(layer)) for layer in range(len(drafter.layers))]
    return drafter(x[None], at[:, None] + torch.arange(BLOCK), context.keys_values(), masks)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_training_at_anchor_a_equals_cached_inference_started_at_a(
    make_drafter: Callable[..., Drafter], layers: str, dtype: torch.dtype
) -> None:
    drafter, rows = make_drafter(LAYERS[layers]).to(dtype), three_documents()
    taps, x = torch.randn(1, 40, 96).to(dtype), torch.randn(5, BLOCK, 32).to(dtype)
    anchors = (5, 6, 15, 21, 33)  # documents 0, 0, 0, 1, 2; the first two are neighbours
    trained = training_forward(drafter, rows, taps, x, anchors, [True] * 5)
    for block, anchor in enumerate(anchors):
        begin = int(rows.doc_start[0, anchor])
        start = anchor - begin
        own = taps[:, begin : begin + 30]
        steps = [start] if block % 2 else [1] * start
        served = cached_inference(drafter, own, x[block], start, steps)
        scale = served.float().abs().max()
        error = (trained[block] - served).float().abs().max() / scale
        assert error < (1e-5 if dtype == torch.float32 else 0.06), (anchor, error)
        if dtype == torch.float32:  # the comparison can see a difference of one context token
            shorter = cached_inference(drafter, own, x[block], start - 1, [start - 1])
            assert (shorter - served).abs().max() / scale > 1e-3


@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_nothing_at_or_after_the_anchor_reaches_its_block(
    make_drafter: Callable[..., Drafter], layers: str
) -> None:
    drafter, rows = make_drafter(LAYERS[layers]), three_documents()
    taps, x = torch.randn(1, 40, 96), torch.randn(3, BLOCK, 32)
    anchors = (8, 9, 22)
    before = training_forward(drafter, rows, taps, x, anchors, [True] * 3)
    changed = taps.clone()
    changed[:, 8:17] += 3.0  # from the first anchor to the end of its document
    after = training_forward(drafter, rows, changed, x, anchors, [True] * 3)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])  # the neighbour one token later has token 8 in its context
    assert torch.equal(before[2], after[2])  # another document
    changed = taps.clone()
    changed[:, 7] += 3.0  # the last token before the anchor
    assert not torch.equal(before[0], training_forward(drafter, rows, changed, x, anchors, [True] * 3)[0])


@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_blocks_do_not_see_each_other_dead_ones_change_nothing(
    make_drafter: Callable[..., Drafter], layers: str
) -> None:
    drafter, rows = make_drafter(LAYERS[layers]), three_documents()
    taps, x = torch.randn(1, 40, 96), torch.randn(3, BLOCK, 32)
    anchors = (8, 9, 10)
    before = training_forward(drafter, rows, taps, x, anchors, [True, True, False])
    other = x.clone()
    other[1:] += 5.0
    after = training_forward(drafter, rows, taps, other, anchors, [True, True, False])
    assert torch.equal(before[0], after[0])
    alone = training_forward(drafter, rows, taps, x[:1], anchors[:1], [True])
    assert torch.allclose(before[0], alone[0], atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_the_decoders_mask_is_trainings_mask_when_the_cache_holds_more(window: int | None) -> None:
    """Even with states at and after the anchor in its cache, a block sees only those before it."""
    context = DraftContext(1)
    positions = torch.arange(20)[None]
    keys = torch.zeros(1, 1, 20, 2)
    context.append([(keys, keys)], positions, torch.ones_like(positions, dtype=torch.bool))
    for start in (1, 4, 12, 19):
        anchors, keep = torch.tensor([[start]]), torch.tensor([[True]])
        wanted = dense_mask(bounds(anchors, keep, torch.zeros_like(positions), BLOCK, window))
        assert torch.equal(context.mask(torch.tensor([start]), BLOCK, window), wanted)


def test_dead_blocks_leave_finite_gradients(make_drafter: Callable[..., Drafter]) -> None:
    drafter, rows = make_drafter(LAYERS["mixed"]), three_documents()
    x = torch.randn(2, BLOCK, 32, requires_grad=True)
    out = training_forward(drafter, rows, torch.randn(1, 40, 96), x, (8, 0), (True, False))
    out[0].sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    assert bool((x.grad[1] == 0).all())
    for parameter in drafter.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())


@torch.no_grad()
def test_slots_of_a_full_layer_see_later_slots_those_of_a_sliding_layer_do_not(
    make_drafter: Callable[..., Drafter],
) -> None:
    rows, taps, x = three_documents(), torch.randn(1, 40, 96), torch.randn(1, BLOCK, 32)
    later = x.clone()
    later[0, 3] += 5.0
    for layers, same in (("full", False), ("sliding", True)):
        drafter = make_drafter(LAYERS[layers])
        before = training_forward(drafter, rows, taps, x, (8,), (True,))
        after = training_forward(drafter, rows, taps, later, (8,), (True,))
        assert torch.equal(before[0, :3], after[0, :3]) is same


@torch.no_grad()
def test_the_window_counts_the_query_itself_and_moves_with_the_slot(
    make_drafter: Callable[..., Drafter],
) -> None:
    """Window 6, anchor 12: slot 0 reaches back to token 7, slot 3 to token 10."""
    drafter = make_drafter(("sliding_attention",))
    rows = pack([Document([5] * 40, [True] * 40)], 40)
    taps, x = torch.randn(1, 40, 96), torch.randn(1, BLOCK, 32)
    base = training_forward(drafter, rows, taps, x, (12,), (True,))[0]
    for token, reached in ((6, []), (7, [0]), (8, [0, 1]), (9, [0, 1, 2]), (10, [0, 1, 2, 3]), (12, [])):
        changed = taps.clone()
        changed[:, token] += 3.0
        out = training_forward(drafter, rows, changed, x, (12,), (True,))[0]
        assert [slot for slot in range(BLOCK) if not torch.equal(out[slot], base[slot])] == reached


def test_names_and_number_of_weights_are_those_of_published_drafters(
    make_drafter: Callable[..., Drafter],
) -> None:
    names = set(make_drafter(("full_attention",) * 5, taps=(0, 1, 2, 3, 4)).state_dict())
    layer = {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    wanted = {f"layers.{number}.{name}" for number in range(5) for name in layer}
    assert names == wanted | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 58
