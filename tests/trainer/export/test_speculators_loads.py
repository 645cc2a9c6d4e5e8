"""The published `speculators` package loads what is exported for it, and computes the same logits.

Run: python -m pytest tests/trainer/export/test_speculators_loads.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import speculators_package
import torch
from safetensors.torch import load_file, save_file
from test_export import saved
from tiny_cases import BLOCK, DIMENSIONS, HIDDEN, MASK_ID, TAPS, WORDS, drafter, qwen3, settings
from tiny_cases import documents as some_documents
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from trainer.checkpoint.drafter import load_drafter
from trainer.data.batch import Batch
from trainer.data.packing import pack
from trainer.errors import ConfigError
from trainer.export.commands import export, import_drafter
from trainer.model.tapped_model import States
from trainer.model.target import Target, load_target
from trainer.model.target_identity import TargetIdentity
from trainer.training.step import DrafterStep

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


@pytest.fixture(scope="module")
def peer() -> Any:
    return speculators_package.load("model", "models.dflash.core")


def loaded(peer: Any, folder: Path) -> Any:
    """Its model, by its own loader; eager attention, for the CPU."""
    with speculators_package.empty_modules():
        config = peer.SpeculatorModelConfig.from_pretrained(str(folder))
        config.transformer_layer_config._attn_implementation = "eager"
        model = peer.SpeculatorModel.from_pretrained(str(folder), config=config, dtype=torch.float32)
    core = sys.modules["speculators.models.dflash.core"]
    model._create_mask_fn = lambda *args, **named: core.create_float_mask(*args, **named, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_the_same_logits(
    layers: str,
    with_head: bool,
    peer: Any,
    tmp_path: Path,
    target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A packed row of three documents with our anchors. The window is longer than the documents: its sliding
    layers hang theirs at the anchor, ours moves on with the slot, as servers do."""
    changes: dict[str, Any] = {"sliding_window": 40} if layers == "mixed" else {}
    changes["target"] = TargetIdentity("tiny", model_type="qwen3")  # a key of ours, which it passes over
    made, target = drafter(layers, **changes), Target(qwen3(), TAPS)
    out = tmp_path / "out"
    export(saved(made, tmp_path / "run"), out, "speculators", target_folder, None, "float32", with_head)
    model = loaded(peer, out)
    assert type(model).__name__ == "DFlashDraftModel"
    assert model.config.aux_hidden_state_layer_ids == [tap + 1 for tap in TAPS]
    assert (model.block_size, model.config.mask_token_id) == (BLOCK, MASK_ID)
    assert torch.equal(model.lm_head.weight, target.head_weight)
    assert torch.equal(model.embed_tokens.weight, target.embedding.weight)

    rows = pack(some_documents((13, 11, 9)), 40)
    taps = target.states(rows.tokens, rows.positions, rows.documents).taps
    step = DrafterStep(made, target, settings(), 12)
    uniform = torch.rand(1, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    blocks = step.blocks(rows, uniform)
    assert bool(blocks.keep.all())
    ours = target.logits(step.hidden(Batch(rows, States(taps)), blocks))

    core = sys.modules["speculators.models.dflash.core"]
    monkeypatch.setattr(core, "select_anchors", lambda *_: (blocks.anchors[0], blocks.keep[0]))
    _, logits, *_ = model._backbone_forward(
        taps,
        rows.tokens,
        rows.supervised.long(),
        torch.zeros(1, 40, HIDDEN),
        rows.documents,
        rows.positions,
        max_anchors=12,
    )
    theirs: Tensor = logits.view(12, BLOCK, WORDS)[:, 1:]
    assert ours.abs().max() > 1
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_an_embedding_that_scales_is_exported_as_what_it_gives(tmp_path: Path) -> None:
    """Gemma's embedding multiplies its rows by the root of the hidden size, and a drafter is trained on what
    comes out. vLLM looks rows up in this layout's table and scales nothing; without one it takes bare ones.
    """
    torch.manual_seed(0)
    folder, out = tmp_path / "target", tmp_path / "out"
    model: Any = AutoModelForCausalLM.from_config(Gemma3TextConfig(**DIMENSIONS, head_dim=8))
    model.bfloat16().save_pretrained(folder)
    target = load_target(folder, TAPS, torch.bfloat16, torch.device("cpu"))
    checkpoint_folder = saved(drafter("full"), tmp_path / "run")
    done = export(checkpoint_folder, out, "speculators", folder)
    state = load_file(out / "model.safetensors")
    given = target.embedding(torch.arange(WORDS))
    assert torch.equal(given, 4 * state["lm_head.weight"])  # 16 hidden numbers
    assert torch.equal(state["embed_tokens.weight"], given)
    assert "vllm" in done.commands and "the package takes bare ones" in done.notes[0]
    with pytest.raises(ConfigError, match="scales what its embedding gives"):
        export(checkpoint_folder, tmp_path / "bare", "speculators", folder, with_head=False)
    plain = export(checkpoint_folder, tmp_path / "plain", "hf", folder)
    assert set(plain.commands) == {"sglang"} and "let it serve --format speculators" in plain.notes[0]

    import_drafter(out, tmp_path / "in", folder)
    # One that was trained on the bare rows is another drafter.
    save_file(state | {"embed_tokens.weight": state["lm_head.weight"].clone()}, out / "model.safetensors")
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight .* is not the target's"):
        import_drafter(out, tmp_path / "other", folder)
    # As the package saves one: without the table, which it takes bare from the target.
    save_file(
        {name: each for name, each in state.items() if name != "embed_tokens.weight"},
        out / "model.safetensors",
    )
    with pytest.raises(ConfigError, match="reads bare rows"):
        import_drafter(out, tmp_path / "other", folder)
    assert not (tmp_path / "other").exists()


def test_what_it_saves_comes_in_again(peer: Any, tmp_path: Path, target_folder: Path) -> None:
    """Its own checkpoint, written by its own code: the same drafter, bit by bit."""
    made = drafter("mixed")
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    export(saved(made, tmp_path / "run"), out, "speculators", target_folder, dtype="float32")
    with speculators_package.empty_modules():
        loaded(peer, out).save_pretrained(str(theirs))
    assert "fc.weight" in load_file(theirs / "model.safetensors")
    import_drafter(theirs, tmp_path / "in", target_folder)
    back = load_drafter(tmp_path / "in")
    assert back.config == made.config
    for name, tensor in made.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
