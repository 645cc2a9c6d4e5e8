"""What a block depends on: everything that it should, and nothing else.

Two ways: exact derivatives, which show at once all context tokens and slots that a block reads; and changed
tokens, with the target in between.

Run: python -m pytest tests/trainer/oracles/test_reach.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tiny_cases import BLOCK, LAYERS, MASK_ID, TAPS, WINDOW, WORDS, documents, drafter, qwen3, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.data.batch import Batch
from trainer.data.packing import Rows, pack
from trainer.model.drafter import Drafter
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.training.objective import Blocks, make_blocks
from trainer.training.step import DrafterStep

ROW = 40


def neighbours(rows: Rows, step: DrafterStep) -> Blocks:
    """A block at every token but the first of each document of row 0: all anchors one token apart; the last
    dead."""
    places = [place for place in range(ROW) if rows.positions[0, place] > 0]
    keep = torch.tensor([[True] * (len(places) - 1) + [False]])
    return make_blocks(rows, torch.tensor([places]), keep, BLOCK, 4.0, MASK_ID)


def forward(step: DrafterStep, rows: Rows, taps: Tensor, x: Tensor, blocks: Blocks) -> Tensor:
    """[N, B, H], slot 0 included."""
    context = step.drafter.context_keys_values(taps, rows.positions)
    out = step.drafter(x, blocks.positions, context, step.masks(rows, blocks))
    return out.view(-1, BLOCK, out.shape[-1])


@pytest.fixture
def setup() -> Callable[[str], tuple[Target, Drafter, DrafterStep, Rows, Blocks]]:
    def make(layers: str) -> tuple[Target, Drafter, DrafterStep, Rows, Blocks]:
        target, made = Target(qwen3(), TAPS), drafter(layers)
        rows = pack(documents((15, 11, 8)), ROW)
        step = DrafterStep(made, target, settings(), ROW)
        return target, made, step, rows, neighbours(rows, step)

    return make


@pytest.mark.parametrize("layers", LAYERS)
def test_derivatives_name_exactly_the_context_and_the_own_slots(layers: str, setup: Callable) -> None:
    target, _, step, rows, blocks = setup(layers)
    taps = target.states(rows.tokens, rows.positions, rows.documents).taps.clone().requires_grad_()
    x = target.embedding(blocks.tokens).clone().requires_grad_()
    out = forward(step, rows, taps, x, blocks)
    mix = torch.randn(out.shape[1:], generator=torch.Generator().manual_seed(0))
    assert blocks.keep[0].tolist() == [True] * (len(out) - 1) + [False]  # the dead one is read by nobody
    for block, anchor in enumerate(blocks.anchors[0, :-1].tolist()):
        by_taps, by_slots = torch.autograd.grad((out[block] * mix).sum(), (taps, x), retain_graph=True)
        read = by_taps[0].abs().amax(-1).nonzero()[:, 0].tolist()
        first = int(rows.doc_start[0, anchor])
        if layers == "sliding":  # the slot that reaches furthest back is slot 0
            first = max(first, anchor - (WINDOW - 1))
        assert read == list(range(first, anchor)), (anchor, read)
        slots = by_slots[0].abs().amax(-1).nonzero()[:, 0].tolist()
        assert slots == [block * BLOCK + slot for slot in range(BLOCK)]


@pytest.mark.parametrize("window", [4, 5, 9])
def test_derivatives_of_single_slots_in_a_sliding_layer(window: int) -> None:
    """Slot o of the block at token a reads tokens a + o - (W - 1) to a - 1, and slots 0 to o."""
    target = Target(qwen3(), TAPS)
    made = drafter("sliding", num_hidden_layers=1, layer_types=("sliding_attention",), sliding_window=window)
    step = DrafterStep(made, target, settings(), ROW)
    rows = pack(documents((15, 11, 8)), ROW)
    blocks = neighbours(rows, step)
    taps = torch.randn(1, ROW, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = target.embedding(blocks.tokens).clone().requires_grad_()
    out = forward(step, rows, taps, x, blocks)
    for block, anchor in enumerate(blocks.anchors[0, :-1].tolist()):
        for slot in range(BLOCK):
            by_taps, by_slots = torch.autograd.grad(out[block, slot].sum(), (taps, x), retain_graph=True)
            first = max(int(rows.doc_start[0, anchor]), anchor + slot - (window - 1))
            assert by_taps[0].abs().amax(-1).nonzero()[:, 0].tolist() == list(range(first, anchor))
            own = by_slots[0].abs().amax(-1).nonzero()[:, 0].tolist()
            assert own == [block * BLOCK + other for other in range(slot + 1)]


@pytest.mark.parametrize("layers", LAYERS)
@torch.no_grad()
def test_no_token_at_or_after_the_anchor_counts_but_the_anchor_as_slot_0(
    layers: str, setup: Callable
) -> None:
    target, _, step, rows, blocks = setup(layers)

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        changed = Rows(tokens, rows.documents, rows.positions, rows.supervised)
        taps = target.states(tokens, rows.positions, rows.documents).taps
        own = make_blocks(changed, blocks.anchors, blocks.keep, BLOCK, 4.0, MASK_ID)
        return forward(step, changed, taps, target.embedding(own.tokens), own), taps

    base, taps = run(rows.tokens)
    for block, anchor in enumerate(blocks.anchors[0, :-1].tolist()):
        later = rows.tokens.clone()
        later[0, anchor + 1 :] = (later[0, anchor + 1 :] + 7) % WORDS
        out, other_taps = run(later)
        assert not torch.equal(taps, other_taps) and torch.equal(out[block], base[block])

        also = later.clone()
        also[0, anchor] = (also[0, anchor] + 7) % WORDS
        out, _ = run(also)
        x = target.embedding(blocks.tokens).clone()
        x[0, block * BLOCK] = target.embedding(also[0, anchor])
        only_slot_0 = forward(step, rows, taps, x, blocks)
        assert torch.equal(out[block], only_slot_0[block]) and not torch.equal(out[block], base[block])

        before = rows.tokens.clone()
        before[0, anchor - 1] = (before[0, anchor - 1] + 7) % WORDS
        out, _ = run(before)
        assert not torch.equal(out[block], base[block])  # the comparison can fail


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attention", ["dense", "flex"])
@pytest.mark.parametrize(
    ("size", "objective"),
    [(24, {}), (24, {"labels": "kl"}), (24, {"weighting": "dpace", "labels": "target"}), (49_152, {})],
)
def test_a_whole_step_reads_nothing_back_and_has_fixed_shapes(
    attention: str, size: int, objective: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward under fake tensors, which have shapes and no values. The size of a row is just a
    number.
    """
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    target, made = Target(qwen3(), TAPS), drafter("mixed")
    config = dataclasses.replace(settings(**objective), attention=attention)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor

        def rows_of(count: int) -> Rows:
            whole = torch.zeros(count, size, dtype=torch.int64)
            return Rows(whole, whole.clone(), whole.clone(), whole.bool())

        step = DrafterStep(made, target, config, 6)
        states = States(fake(torch.empty(2, size, 32)), fake(torch.empty(2, size, 16)))
        sums = step.sums(Batch(rows_of(2), states), torch.empty(2, size, dtype=torch.float64))
        sums.loss.backward()
        assert sums.correct.shape == (BLOCK - 1,)
