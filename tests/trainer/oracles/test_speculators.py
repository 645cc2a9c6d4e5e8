"""A second implementation, the published `speculators` package, with the same weights: the same logits, the
same mask.

Only its model is used; speculators_package.py says what it makes do without.

Run: python -m pytest tests/trainer/oracles/test_speculators.py
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import speculators_package
import torch
from slow_rules import layout
from tiny_cases import BLOCK, HIDDEN, MASK_ID, TAPS, WORDS, documents, drafter, qwen3, settings
from torch import Tensor
from transformers import Qwen3Config

from trainer.data.batch import Batch
from trainer.data.packing import Rows, pack
from trainer.model.drafter import Drafter
from trainer.model.mask import bounds, dense_mask
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.training.objective import dpace_weights
from trainer.training.step import DrafterStep

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


@pytest.fixture(scope="module")
def peer() -> Any:
    """The modules of speculators' DFlash: core and attention, and its losses' utilities."""
    return speculators_package.load("losses.utils", "models.dflash.attention", "models.dflash.core")


def peer_model(peer: Any, made: Drafter, target: Target) -> Any:
    """Its model with our drafter's weights and the target's embedding and head."""
    config = made.config
    inner = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        layer_types=list(config.layer_types),
        tie_word_embeddings=False,
    )
    inner._attn_implementation = "eager"
    own = peer.DFlashSpeculatorConfig(
        transformer_layer_config=inner,
        draft_vocab_size=WORDS,
        block_size=config.block_size,
        aux_hidden_state_layer_ids=[tap + 1 for tap in config.taps],
        mask_token_id=config.mask_token_id,
    )
    model = peer.DFlashDraftModel(own).eval()
    state = {
        **made.state_dict(),
        "embed_tokens.weight": target.embedding.weight,
        "lm_head.weight": target.head_weight,
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight"} and not unexpected
    return model


def one_row() -> Rows:
    rows = pack(documents((13, 11, 9)), 40)
    assert len(rows) == 1
    return rows


@torch.no_grad()
def test_the_same_weights_give_the_same_logits(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed row of three documents; the anchors are ours, for it would not sample the same ones."""
    made, target, rows = drafter("full"), Target(qwen3(), TAPS), one_row()
    taps = target.states(rows.tokens, rows.positions, rows.documents).taps
    step = DrafterStep(made, target, settings(), 12)
    blocks = step.blocks(
        rows, torch.rand(1, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    )
    assert bool(blocks.keep.all())
    ours = target.logits(step.hidden(Batch(rows, States(taps)), blocks))  # [N, B-1, V]

    core = sys.modules["speculators.models.dflash.core"]
    monkeypatch.setattr(core, "select_anchors", lambda *_: (blocks.anchors[0], blocks.keep[0]))
    model = peer_model(peer, made, target)
    model._create_mask_fn = lambda *args, **kwargs: core.create_float_mask(
        *args, **kwargs, dtype=torch.float32
    )
    _, logits, *_ = model._backbone_forward(
        taps,
        rows.tokens,
        rows.supervised.long(),
        torch.zeros(1, 40, HIDDEN),
        rows.documents,
        rows.positions,
        max_anchors=12,
    )
    theirs = logits.view(12, BLOCK, WORDS)[:, 1:]
    assert ours.abs().max() > 1 and MASK_ID in blocks.tokens
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-5, error


def their_mask(documents: list[int], anchors: list[int], window: int | None) -> Tensor:
    attention = sys.modules["speculators.models.dflash.attention"]
    mod, queries, keys = attention.create_anchor_block_mask_mod(
        torch.tensor(documents), len(documents), torch.tensor(anchors), BLOCK, sliding_window=window
    )
    none = torch.tensor(0)
    return mod(none, none, torch.arange(queries)[:, None], torch.arange(keys)[None, :])


@pytest.mark.parametrize("seed", range(8))
def test_the_mask_of_full_layers_is_the_same(peer: Any, seed: int) -> None:
    row = layout([9, 1, 14, 3, 6], 7, seed)
    alive = torch.ones(1, 7, dtype=torch.bool)  # its padded anchors are masked in the loss, not here
    starts = torch.tensor([row.starts])
    ours = dense_mask(bounds(torch.tensor([row.anchors]), alive, starts, BLOCK, None))[0, 0]
    assert torch.equal(ours, their_mask(row.documents, row.anchors, None))


def test_in_sliding_layers_it_differs_as_known(peer: Any) -> None:
    """Its window hangs at the anchor for all slots; a server's moves on with the slot. Inside a block both
    are causal.
    """
    row = layout([30], 1, 0)
    anchor, window, size = 20, 6, 30
    ours = dense_mask(
        bounds(torch.tensor([[anchor]]), torch.tensor([[True]]), torch.tensor([row.starts]), BLOCK, window)
    )[0, 0]
    theirs = their_mask(row.documents, [anchor], window)
    assert torch.equal(ours[:, size:], theirs[:, size:])
    for slot in range(BLOCK):
        assert ours[slot, :size].nonzero()[:, 0].tolist() == list(range(anchor + slot - window + 1, anchor))
        assert theirs[slot, :size].nonzero()[:, 0].tolist() == list(range(anchor - window, anchor))


def test_its_dpace_weights_are_the_same(peer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    supervised = torch.rand(9, BLOCK - 1, generator=generator) < 0.7
    confidence = torch.rand(9, BLOCK - 1, generator=generator)
    with_anchor = torch.nn.functional.pad(supervised, (1, 0))
    losses = torch.nn.functional.pad(-confidence.log(), (1, 0))
    theirs = sys.modules["speculators.losses.utils"].dpace_loss_decay(
        None, with_anchor.float().view(1, -1), BLOCK, 0.5, losses.view(1, -1)
    )
    ours = dpace_weights(confidence, supervised, 0.5)
    assert torch.allclose(ours, theirs.view(9, BLOCK)[:, 1:], rtol=1e-6)
