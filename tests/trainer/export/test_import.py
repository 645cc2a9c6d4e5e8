"""Published drafters of both layouts come in whole or not at all, and go out again byte for byte.

Run: python -m pytest tests/trainer/export/test_import.py
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import saved
from tiny_cases import HIDDEN, TAPS, WORDS, drafter
from torch import Tensor, nn
from transformers import Qwen3Config
from typer.testing import CliRunner

from trainer.checkpoint.drafter import load_drafter
from trainer.cli import app
from trainer.errors import ConfigError
from trainer.export.commands import export, import_drafter
from trainer.model.drafter_config import read_drafter_config
from trainer.model.target_identity import TargetIdentity

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("format", ["hf", "speculators"])
@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": LLAMA3, "attention_bias": True, "eos_token_id": 9},
        {"target": TargetIdentity("tiny", model_type="qwen3", tie_word_embeddings=False)},
    ],
)
def test_out_in_and_out_again_is_the_same_to_the_byte(
    format: str, layers: str, changes: dict[str, Any], tmp_path: Path, target_folder: Path
) -> None:
    made = drafter(layers, **changes)
    first, inside, again = (tmp_path / name for name in ("first", "inside", "again"))
    export(saved(made, tmp_path / "run"), first, format, target_folder)
    import_drafter(first, inside, None if format == "speculators" else target_folder)
    export(inside, again, format, target_folder)
    assert sorted(files(first)) == ["config.json", "model.safetensors"]
    assert files(first) == files(again)
    back = load_drafter(inside)
    assert back.config == made.config
    for name, tensor in made.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.bfloat16().float())


def test_both_layouts_bring_in_the_same_drafter(tmp_path: Path, target_folder: Path) -> None:
    folder = saved(drafter("mixed"), tmp_path / "run")
    for format in ("hf", "speculators"):
        export(folder, tmp_path / format, format, target_folder)
        import_drafter(tmp_path / format, tmp_path / f"{format}-in", target_folder)
    assert files(tmp_path / "hf-in") == files(tmp_path / "speculators-in")


@pytest.fixture
def published(tmp_path: Path, target_folder: Path) -> Path:
    """A drafter in z-lab's layout, as if from elsewhere."""
    export(saved(drafter("full"), tmp_path / "run"), tmp_path / "published", "hf", target_folder)
    return tmp_path / "published"


@pytest.fixture
def speculators(tmp_path: Path, target_folder: Path) -> Path:
    export(saved(drafter("full"), tmp_path / "run2"), tmp_path / "spec", "speculators", target_folder)
    return tmp_path / "spec"


def change(folder: Path, **keys: Any) -> None:
    """Set keys of config.json; "a.b" reaches inside, ... removes."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    for key, value in keys.items():
        *inside, last = key.split("__")
        place = data
        for part in inside:
            place = place[part]
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = value
    path.write_text(json.dumps(data))


def weights(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors")


def test_what_published_drafters_leave_out_is_understood(published: Path, tmp_path: Path) -> None:
    """RoPE in the older spelling alone, the block size in one place, `torch_dtype`, keys without meaning."""
    change(
        published,
        rope_parameters=...,
        block_size=...,
        dtype=...,
        torch_dtype="bfloat16",
        transformers_version="4.57.1",
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.25, "rope_dim": 6},
        layer_types=["full_attention"] * 2,
    )
    import_drafter(published, tmp_path / "in", None)
    assert load_drafter(tmp_path / "in").config == drafter("full").config


def test_shards_and_the_prefix_of_some_savers_are_understood(published: Path, tmp_path: Path) -> None:
    state = load_file(published / "model.safetensors")
    (published / "model.safetensors").unlink()
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({f"model.{name}": state[name] for name in part}, published / file)
    index = {f"model.{name}": file for file, part in parts.items() for name in part}
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    import_drafter(published, tmp_path / "in", None)
    back = load_drafter(tmp_path / "in").state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name].float()) for name in state)


# --- refusals ---


def refused(source: Path, tmp_path: Path, target: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        import_drafter(source, tmp_path / "in", target)
    assert not (tmp_path / "in").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", [5, None, ["a"], "../model.safetensors", "/model.safetensors", ""])
def test_an_index_that_names_no_file_of_the_folder_is_refused(
    name: Any, published: Path, tmp_path: Path
) -> None:
    (published / "model.safetensors").rename(published.parent / "model.safetensors")
    index = {"weight_map": {"fc.weight": name}}
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"weight fc.weight is in {name!r}, no file of this folder" in refused(published, tmp_path)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda s: s.pop("layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight [24, 16] is missing"),
        (lambda s: s.update(extra=torch.zeros(3, 2)), "extra [3, 2] is not a drafter's"),
        (
            lambda s: s.update({"fc.weight": torch.zeros(16, 48)}),
            "fc.weight has shape [16, 48], not [16, 32]",
        ),
        (
            lambda s: s.update({"layers.2.mlp.up_proj.weight": torch.zeros(24, 16)}),
            "layers.2.mlp.up_proj.weight [24, 16] is not a drafter's",
        ),
        (lambda s: s.update({"norm.weight": torch.zeros(16, dtype=torch.int8)}), "norm.weight is I8"),
    ],
)
def test_weights_that_do_not_belong_are_named_with_their_shapes(
    edit: Callable[[dict[str, Tensor]], Any], told: str, published: Path, tmp_path: Path
) -> None:
    weights(published, edit)
    assert told in refused(published, tmp_path)


@pytest.mark.parametrize("first", [0, 1, 2, None])
def test_layers_of_no_said_types_are_those_of_transformers(
    first: int | None, published: Path, tmp_path: Path, target_folder: Path
) -> None:
    """The keys of older configurations: from max_window_layers on, 28 unless said, layers slide."""
    keys: dict[str, Any] = {"layer_types": ..., "use_sliding_window": True, "sliding_window": 9}
    change(published, **keys, max_window_layers=... if first is None else first)
    import_drafter(published, tmp_path / "in", target_folder)
    made = read_drafter_config(tmp_path / "in")
    wanted = Qwen3Config.from_pretrained(published)
    assert list(made.layer_types) == wanted.layer_types
    assert made.sliding_window == (9 if "sliding_attention" in wanted.layer_types else None)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"model_type": "llama"}, "model_type"),
        ({"dflash_config__conv_kernel_size": 2}, "dflash_config.conv_kernel_size is 2"),
        ({"dflash_config__projector_type": "domino"}, "dflash_config.projector_type"),
        ({"output_multiplier": 2.0}, "output_multiplier"),
        ({"dflash_config__final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32"),
        ({"target_hidden_size": 20}, "target_hidden_size is 20"),
        ({"is_causal": True}, "is_causal"),
        ({"dflash_config__is_causal": True}, "dflash_config.is_causal"),
        ({"is_causal": True, "dflash_config__causal": False}, "config.json: is_causal"),
        ({"query_zero_predicts_next": True}, "query_zero_predicts_next"),
        ({"dflash_config__query_zero_predicts_next": True}, "dflash_config.query_zero_predicts_next"),
        ({"use_gemma_norm": True}, "use_gemma_norm"),
        ({"rope_parameters__partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters__rope_dim": 4}, "rope_dim"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_target_layers": ...}, "num_target_layers"),
        ({"dflash_config__mask_token_id": ...}, "mask_token_id"),
        ({"block_size": 8}, "block_size"),
    ],
)
def test_another_kind_of_drafter_is_refused_by_its_key(
    keys: dict[str, Any], told: str, published: Path, tmp_path: Path
) -> None:
    change(published, **keys)
    text = refused(published, tmp_path)
    assert told in text and str(published / "config.json") in text


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"speculators_config__verifier__name_or_path": "org/elsewhere"}, "--target"),
        ({"mask_token_id": WORDS}, "mask token id"),
    ],
)
def test_speculators_of_another_kind_are_refused(
    keys: dict[str, Any], told: str, speculators: Path, tmp_path: Path
) -> None:
    change(speculators, **keys)
    assert told in refused(speculators, tmp_path)


def test_bidirectional_sliding_layers_are_refused(tmp_path: Path, target_folder: Path) -> None:
    export(saved(drafter("mixed"), tmp_path / "run"), tmp_path / "spec", "speculators", target_folder)
    change(tmp_path / "spec", sliding_window_non_causal=True)
    assert "sliding_window_non_causal" in refused(tmp_path / "spec", tmp_path)


def test_an_embedding_that_is_not_the_targets_is_refused(speculators: Path, tmp_path: Path) -> None:
    weights(speculators, lambda state: state["lm_head.weight"][3, 4].add_(1.0))
    assert f"lm_head.weight [{WORDS}, {HIDDEN}] is not the target's" in refused(speculators, tmp_path)


def test_a_drafter_of_another_target_is_refused(
    published: Path, tmp_path: Path, target_model: nn.Module
) -> None:
    config = target_model.config.to_dict()  # type: ignore[operator, union-attr]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    assert "num_hidden_layers 4 there, 7 here" in refused(published, tmp_path, other)


def test_a_mask_embedding_of_its_own_is_refused(published: Path, tmp_path: Path) -> None:
    (published / "mask_embedding.pt").write_bytes(b"")
    assert "mask embedding" in refused(published, tmp_path)


@pytest.mark.parametrize("cut", [4, 40, -1])
def test_a_truncated_file_is_refused(cut: int, published: Path, tmp_path: Path) -> None:
    path = published / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    text = refused(published, tmp_path)
    assert "cannot read the weights" in text and str(path) in text


def test_a_table_of_contents_beyond_the_file_is_refused(published: Path, tmp_path: Path) -> None:
    path = published / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    assert "cannot read the weights" in refused(published, tmp_path)


def test_a_folder_without_a_drafter(tmp_path: Path) -> None:
    assert "no drafter there" in refused(tmp_path / "nothing", tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("[1, 2]")
    assert "keys and values" in refused(tmp_path / "half", tmp_path)


def test_the_command(published: Path, tmp_path: Path, target_folder: Path) -> None:
    command = ["import", str(published), str(tmp_path / "in"), "--target", str(target_folder)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "25 tensors" in result.output
    assert len(TAPS) * HIDDEN == load_file(tmp_path / "in" / "model.safetensors")["fc.weight"].shape[1]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "is there already" in again.output
