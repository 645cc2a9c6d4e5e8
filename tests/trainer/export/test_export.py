"""What `export` writes, read by a reader that shares nothing with it, to the last name and key; and what
it refuses.

Run: python -m pytest tests/trainer/export/test_export.py
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from reader import drafted, read, tensors_of
from safetensors.torch import load_file, save_file
from tiny_cases import BLOCK, HIDDEN, MASK_ID, TAPS, WORDS, drafter
from torch import nn
from typer.testing import CliRunner

from trainer.checkpoint import files as checkpoint
from trainer.cli import app
from trainer.errors import ConfigError, TrainerError
from trainer.evaluation.proposers import BatchDrafter
from trainer.export.commands import export, serving
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.sections import Optimizer
from trainer.training.optim import DrafterOptimizer

PER_LAYER = 11
TEXT = [5, 9, 33, 17, 2, 60, 41, 8, 8, 25, 13]


def saved(made: Drafter, root: Path) -> Path:
    return checkpoint.save(root, 7, made, DrafterOptimizer(made, Optimizer()), {"why": "a test"}, keep=1)


@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
def test_an_independent_reader_drafts_the_same(
    layers: str, tmp_path: Path, target_model: nn.Module, target_folder: Path
) -> None:
    made = drafter(layers)
    out = tmp_path / "out"
    export(saved(made, tmp_path / "run"), out, "hf", target_folder, dtype="float32")
    reader = read(out)
    assert len(reader.table) == 2 * PER_LAYER + 3
    theirs = drafted(reader, target_model, TEXT)

    target = Target(target_model, TAPS)
    ours = BatchDrafter(made, target)
    positions = torch.arange(len(TEXT) - 1)[None]
    states = target.run(torch.tensor([TEXT[:-1]]), positions)
    ours.read(states.taps, positions, torch.ones_like(positions, dtype=torch.bool))
    mine = ours.logits(torch.tensor([TEXT[-1]]), torch.tensor([len(TEXT) - 1]))[0]
    assert mine.shape == (BLOCK - 1, WORDS) and mine.abs().max() > 1
    assert (mine.double() - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_weights_are_bfloat16_unless_told_otherwise(tmp_path: Path) -> None:
    made = drafter("full")
    done = export(saved(made, tmp_path / "run"), tmp_path / "out", "hf", None)
    reader = read(tmp_path / "out")
    assert {entry["dtype"] for entry in reader.table.values()} == {"BF16"}
    assert done.dtype == "bfloat16" and done.tensors == len(reader.table) == 2 * PER_LAYER + 3
    assert done.parameters == sum(tensor.numel() for tensor in made.parameters())
    for name, tensor in made.state_dict().items():
        assert torch.equal(reader.weights[name], tensor.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_float16_for_those_who_have_no_bfloat16(tmp_path: Path) -> None:
    made = drafter("full")
    export(saved(made, tmp_path / "run"), tmp_path / "half", "hf", None, dtype="float16")
    weights = load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in made.state_dict().items():
        assert torch.equal(weights[name], tensor.half())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    made.norm.weight.data[2] = 70_000.0  # beyond what float16 holds
    text = refused(tmp_path, saved(made, tmp_path / "large"), tmp_path / "out", "hf", None, dtype="float16")
    assert "weight norm.weight does not fit float16" in text


def test_biases_are_exported_with_their_names(tmp_path: Path, target_folder: Path) -> None:
    made = drafter("full", attention_bias=True)
    export(saved(made, tmp_path / "run"), tmp_path / "out", "hf", target_folder)
    table = read(tmp_path / "out").table
    assert len(table) == 2 * (PER_LAYER + 4) + 3
    assert table["layers.1.self_attn.o_proj.bias"]["shape"] == [HIDDEN]
    assert table["layers.0.self_attn.k_proj.bias"]["shape"] == [2 * 6]


def test_every_key_of_config_json(tmp_path: Path) -> None:
    """The whole file, so that no key comes or goes unseen."""
    export(saved(drafter("mixed"), tmp_path / "run"), tmp_path / "out", "hf", None)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK,
        "bos_token_id": None,
        "dflash_config": {
            "block_size": BLOCK,
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(TAPS),
        },
        "dtype": "bfloat16",
        "eos_token_id": None,
        "head_dim": 6,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 32768,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 4,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": 50.0,
        "sliding_window": 5,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": WORDS,
    }


def test_every_key_of_speculators_config_json(tmp_path: Path, target_folder: Path) -> None:
    """Taps counted from 1, one speculative token less than the block, the target by name."""
    export(
        saved(drafter("full"), tmp_path / "run"), tmp_path / "out", "speculators", target_folder, "org/tiny"
    )
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    body = data.pop("transformer_layer_config")
    version = data.pop("speculators_version")
    assert version[:2] == "0."
    assert data == {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "block_size": BLOCK,
        "draft_vocab_size": WORDS,
        "dtype": "bfloat16",
        "mask_token_id": MASK_ID,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # vLLM: otherwise its full layers are causal
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": BLOCK - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "org/tiny"},
        },
        "speculators_model_type": "dflash",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    assert body["model_type"] == "qwen3" and body["vocab_size"] == WORDS and body["head_dim"] == 6
    assert body["rope_parameters"] == {"rope_theta": 50.0, "rope_type": "default"}
    assert "block_size" not in body and "dflash_config" not in body


@pytest.mark.parametrize(("layers", "non_causal"), [("full", True), ("sliding", False)])
def test_vllm_serves_the_layers_as_they_were_trained(
    layers: str, non_causal: bool, tmp_path: Path, target_folder: Path
) -> None:
    """Its parser of this layout sets `causal = not sliding_window_non_causal` for every layer."""
    made = drafter(layers)
    done = export(saved(made, tmp_path / "run"), tmp_path / "out", "speculators", target_folder)
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    assert data["sliding_window_non_causal"] is non_causal
    assert done.commands == {"vllm": f"vllm serve {tmp_path / 'out'}"} and not done.notes


def test_a_mixed_drafter_is_not_offered_to_vllm_in_the_layout_that_it_reads_wrongly() -> None:
    config = drafter("mixed").config
    commands, notes = serving(config, "speculators", Path("out"), "T")
    assert commands == {} and any("causal" in note and "--format hf" in note for note in notes)
    commands, notes = serving(config, "hf", Path("out"), "T")
    assert commands["vllm"].startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve T ") and notes


def test_speculators_carries_embedding_and_head(
    tmp_path: Path, target_model: nn.Module, target_folder: Path
) -> None:
    folder = saved(drafter("full"), tmp_path / "run")
    export(folder, tmp_path / "with", "speculators", target_folder, dtype="float32")
    export(folder, tmp_path / "without", "speculators", target_folder, with_head=False)
    weights, table = tensors_of(tmp_path / "with" / "model.safetensors")
    assert len(table) == 2 * PER_LAYER + 3 + 2
    assert torch.equal(weights["embed_tokens.weight"], target_model.get_input_embeddings().weight)  # type: ignore[operator]
    assert torch.equal(weights["lm_head.weight"], target_model.get_output_embeddings().weight)  # type: ignore[operator]
    assert len(tensors_of(tmp_path / "without" / "model.safetensors")[1]) == 2 * PER_LAYER + 3


def test_a_tied_target_gives_its_embedding_as_the_head(tmp_path: Path, target_folder: Path) -> None:
    tied = tmp_path / "tied"
    tied.mkdir()
    config = json.loads((target_folder / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    state = load_file(target_folder / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tied / "model.safetensors")
    export(saved(drafter("full"), tmp_path / "run"), tmp_path / "out", "speculators", tied, dtype="float32")
    weights, _ = tensors_of(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], state["model.embed_tokens.weight"])


# --- refusals: nothing half-written stays ---


def refused(tmp_path: Path, *given: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        export(*given, **named)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    return str(caught.value)


def test_a_weight_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    folder = saved(drafter("full"), tmp_path / "run")
    state = load_file(folder / "model.safetensors")
    state["fc.weight"] = torch.zeros(HIDDEN, 3 * HIDDEN)
    save_file(state, folder / "model.safetensors")
    text = refused(tmp_path, folder, tmp_path / "out", "hf", None)
    assert "fc.weight" in text and str(3 * HIDDEN) in text and str(2 * HIDDEN) in text


def test_another_target_is_refused_with_what_differs(tmp_path: Path, target_folder: Path) -> None:
    folder = saved(drafter("full", num_target_layers=6), tmp_path / "run")
    text = refused(tmp_path, folder, tmp_path / "out", "hf", target_folder)
    assert "num_hidden_layers 6 there, 4 here" in text


def test_speculators_needs_the_target(tmp_path: Path) -> None:
    folder = saved(drafter("full"), tmp_path / "run")
    assert "--target" in refused(tmp_path, folder, tmp_path / "out", "speculators", None)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = saved(drafter("full"), tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="there already"):
        export(folder, tmp_path / "out", "hf", None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    folder = saved(drafter("full"), tmp_path / "run")
    state = load_file(folder / "model.safetensors")
    state["norm.weight"][3] = float("nan")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(TrainerError, match=r"norm\.weight is not finite"):
        export(folder, tmp_path / "out", "hf", None)
    assert not (tmp_path / "out").exists()


# --- the command ---


def test_the_command_prints_how_to_serve(tmp_path: Path, target_folder: Path) -> None:
    folder = saved(drafter("full"), tmp_path / "run")
    result = CliRunner().invoke(
        app, ["export", str(folder), str(tmp_path / "out"), "--target", str(target_folder)]
    )
    assert result.exit_code == 0, result.output
    assert (
        f"python -m sglang.launch_server --model-path {target_folder} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {tmp_path / 'out'} --speculative-num-draft-tokens {BLOCK}"
    ) in result.output
    line = next(line for line in result.output.splitlines() if line.startswith("vllm: "))
    assert line.startswith(f"vllm: vllm serve {target_folder} --speculative-config '")
    given = json.loads(line[line.index("'") + 1 : line.rindex("'")])
    assert given == {"method": "dflash", "model": str(tmp_path / "out"), "num_speculative_tokens": BLOCK - 1}


def test_the_lines_can_be_pasted_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole paths, quoted where a shell would cut them."""
    folder = saved(drafter("full"), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    done = export(folder, Path("my drafter"), "hf", None)
    words = shlex.split(done.commands["sglang"])
    assert words[words.index("--speculative-draft-model-path") + 1] == str(tmp_path / "my drafter")
    words = shlex.split(done.commands["vllm"])
    assert json.loads(words[-1])["model"] == str(tmp_path / "my drafter")


def test_the_command_prints_json_and_one_line_errors(tmp_path: Path) -> None:
    folder = saved(drafter("full"), tmp_path / "run")
    command = ["export", str(folder), str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, command)
    document = json.loads(result.output)
    assert document["schema"] == "trainer.export/1" and document["tensors"] == 2 * PER_LAYER + 3
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "Traceback" not in again.output
    assert f"{tmp_path / 'out'}: is there already" in again.output
