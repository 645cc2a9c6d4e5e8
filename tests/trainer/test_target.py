"""Taps against the target's own hidden states, for every architecture; packed rows; pairs that do not fit.

Run: python -m pytest tests/trainer/test_target.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import random_model, save_target
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.model.drafter_config import from_json, read_rope
from trainer.model.pair import check_pair, check_tokenizer, drafter_config, mask_token_id
from trainer.model.taps import check_taps, default_taps
from trainer.model.target import Target, load_target
from trainer.model.target_files import read_config
from trainer.sections import Drafter as DrafterSection

TAPS = (0, 2, 4)


def tokens_and_positions(size: int = 24, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 90, (rows, size), generator=generator)
    return tokens, torch.arange(size).expand(rows, size)


def own_taps(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1] for tap in TAPS], dim=-1)


@pytest.mark.parametrize("full", [False, True])
def test_taps_are_the_targets_own_hidden_states(kind: str, full: bool) -> None:
    model = random_model(kind)
    tokens, positions = tokens_and_positions()
    wanted = own_taps(model, tokens)
    target = Target(model, TAPS)
    states = target.run(tokens, positions, full=full)
    assert torch.equal(states.taps, wanted)
    if full:
        assert states.final is not None
        with torch.no_grad():
            assert torch.equal(target.logits(states.final), model(tokens).logits)


def test_the_target_runs_only_to_its_last_tap_and_without_its_head(kind: str) -> None:
    model = random_model(kind)
    target = Target(model, TAPS)
    ran: list[int] = []
    for number, layer in enumerate(target.decoder.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda *_: ran.append(-1))
    tokens, positions = tokens_and_positions()
    target.run(tokens, positions)
    assert ran == [0, 1, 2, 3, 4]
    ran.clear()
    target.run(tokens, positions, full=True)
    assert ran == [0, 1, 2, 3, 4, 5]


def test_documents_packed_in_a_row_do_not_see_each_other(kind: str) -> None:
    target = Target(random_model(kind), TAPS)
    tokens, _ = tokens_and_positions(24, 1)
    positions = torch.cat((torch.arange(15), torch.arange(9)))[None]
    documents = torch.tensor([[0] * 15 + [1] * 9])
    packed = target.states(tokens, positions, documents, full=True)
    for part in (slice(0, 15), slice(15, 24)):
        alone = target.run(tokens[:, part], positions[:, part], full=True)
        assert torch.allclose(packed.taps[:, part], alone.taps, atol=1e-5)
        assert packed.final is not None and alone.final is not None
        assert torch.allclose(packed.final[:, part], alone.final, atol=1e-4)


def test_a_multi_token_prediction_layer_is_no_layer_of_the_target(tmp_path: Path) -> None:
    """Its weights lie in the checkpoint (mtp.*); taps count the layers that a forward pass runs."""
    folder = save_target(tmp_path / "target", "qwen3.5")
    weights = load_file(folder / "model.safetensors")
    extra = {
        name.replace("model.", "mtp.", 1): tensor.clone()
        for name, tensor in weights.items()
        if ".layers.0." in name
    }
    assert extra
    save_file({**weights, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    target = load_target(folder, TAPS, torch.float32, torch.device("cpu"))
    assert target.layer_count == 6
    tokens, positions = tokens_and_positions()
    assert torch.equal(target.run(tokens, positions).taps, own_taps(target.model, tokens))


def test_an_extra_module_behind_the_layers_is_not_counted() -> None:
    model = random_model("qwen3")
    decoder = model.get_decoder()  # type: ignore[operator]
    decoder.layers.append(decoder.layers[0])  # as models keep their prediction layers; never run by forward
    target = Target(model, TAPS)
    assert target.layer_count == 6
    with pytest.raises(ConfigError, match="tap 6 is out of range: the target has layers 0 to 5"):
        Target(model, (0, 6))


def test_the_default_rule_for_taps() -> None:
    assert default_taps(36, 5) == [1, 9, 17, 25, 33]
    assert default_taps(64, 5) == [1, 16, 31, 46, 61]
    assert default_taps(40, 8) == [1, 6, 11, 16, 22, 27, 32, 37]
    assert default_taps(36, 1) == [18]
    with pytest.raises(ConfigError, match="not a rising list"):
        check_taps(default_taps(4, 3), 4)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([6], "tap 6 is out of range: the target has layers 0 to 5"),
        ([-1], "tap -1 is out of range"),
        ([5], "tap 5 is the target's last layer"),
        ([3, 1], "not a rising list"),
        ([2, 2], "not a rising list"),
        ([], "not a rising list"),
    ],
)
def test_impossible_taps_are_refused(taps: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_taps(taps, 6)


def test_weights_can_be_widened_for_a_while(make_target: Callable[..., Target]) -> None:
    target = make_target()
    frequencies = target.decoder.rotary_emb.inv_freq
    for weight in target.model.parameters():
        weight.data = weight.data.bfloat16()
    before = [weight.clone() for weight in target.model.parameters()]
    with target.widened(True):
        assert target.dtype == torch.float32
        assert target.embedding.weight.dtype == torch.float32
    assert all(torch.equal(*pair) for pair in zip(before, target.model.parameters(), strict=True))
    assert frequencies.dtype == torch.float32 and target.dtype == torch.bfloat16


# --- pairs ---


def raw_config(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
    }
    return {**values, **changes}


def test_the_drafter_takes_the_targets_dimensions_and_the_recipes_wishes() -> None:
    made = drafter_config(DrafterSection(layers=3, tap_count=2), raw_config(), 7)
    assert (made.hidden_size, made.head_dim, made.taps, made.mask_token_id) == (64, 16, (1, 5), 7)
    section = DrafterSection(layers=3, taps=[0, 3, 4, 6], head_dim=32, attention_heads=8, key_value_heads=1)
    made = drafter_config(section, raw_config(head_dim=16), 7)
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (8, 1, 32)
    assert len(made.taps) == 4 and made.num_hidden_layers == 3  # independent of each other
    with pytest.raises(ConfigError, match="4 attention heads cannot share 3 key/value heads"):
        drafter_config(DrafterSection(layers=2, key_value_heads=3), raw_config(), 7)


def test_config_json_comes_back_the_same_and_says_what_servers_read() -> None:
    section = DrafterSection(
        layers=2, block_size=8, layer_types=["sliding_attention", "full_attention"], sliding_window=64
    )
    made = drafter_config(section, raw_config(rope_theta=1e6), 7)
    data = json.loads(json.dumps(made.to_json("bfloat16")))
    assert from_json(data) == made
    assert data["architectures"] == ["DFlashDraftModel"] and data["model_type"] == "qwen3"
    assert data["block_size"] == data["dflash_config"]["block_size"] == 8
    assert data["num_target_layers"] == 8 and data["use_sliding_window"] is True
    assert data["rope_theta"] == data["rope_parameters"]["rope_theta"] == 1e6
    assert data["tie_word_embeddings"] is False and data["dtype"] == "bfloat16"


def test_contradicting_or_missing_keys_are_refused_by_name() -> None:
    data = drafter_config(DrafterSection(layers=2), raw_config(), 7).to_json()
    with pytest.raises(ConfigError, match="block_size is said 2 times"):
        from_json({**data, "block_size": 4})
    with pytest.raises(ConfigError, match="unknown layer type 'linear_attention'"):
        from_json({**data, "layer_types": ["linear_attention", "full_attention"]})
    with pytest.raises(ConfigError, match="key 'num_target_layers' is missing"):
        from_json({key: value for key, value in data.items() if key != "num_target_layers"})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_size": "8", "dflash_config.block_size": "8"}, "block_size is '8'"),
        ({"block_size": [8]}, r"block_size is \[8\]"),
        ({"block_size": 0, "dflash_config.block_size": 0}, "block_size is 0"),
        ({"head_dim": "16"}, "head_dim is '16'"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings is 1.5"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"bos_token_id": ""}, "bos_token_id is ''"),
        ({"pad_token_id": False}, "pad_token_id is False"),
        ({"layer_types": 2}, "layer_types is 2"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn'"),
        ({"rope_scaling": [4]}, "rope_scaling is"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta is '1e6'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"dflash_config.mask_token_id": 500}, "mask token id 500 is outside the target's embedding of 500"),
        ({"dflash_config.target_layer_ids": [0, 8]}, r"\[0, 8\], and the target has layers 0 to 7"),
        ({"dflash_config.target_layer_ids": [-1, 2]}, "layers 0 to 7"),
        ({"dflash_config.target_layer_ids": []}, "not a list of layers"),
        ({"dflash_config.target_layer_ids": [True]}, "not a list of layers"),
    ],
)
def test_values_that_are_none_of_a_drafters_are_refused_by_key(keys: dict[str, Any], message: str) -> None:
    """Somebody else's config.json may hold anything; each of these was a traceback once, or was served."""
    section = DrafterSection(layers=2, block_size=8)
    data = json.loads(json.dumps(drafter_config(section, raw_config(), 7).to_json()))
    from_json(data)
    for key, value in keys.items():
        part = data["dflash_config"] if "." in key else data
        part[key.rpartition(".")[2]] = value
    with pytest.raises(ConfigError, match=message) as caught:
        from_json(data, "there/config.json")
    assert caught.value.where.startswith("there/config.json")


def test_keys_that_are_null_are_left_out() -> None:
    made = drafter_config(DrafterSection(layers=2, block_size=8), raw_config(), 7)
    optional = ("rms_norm_eps", "attention_bias", "initializer_range", "max_position_embeddings", "head_dim")
    assert from_json({**made.to_json(), **dict.fromkeys(optional)}) == made


def test_heads_of_an_odd_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 is odd") as caught:
        drafter_config(DrafterSection(layers=2, head_dim=7), raw_config(), 7)
    assert caught.value.where == "train.drafter.head_dim"


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, (10_000.0, None)),
        ({"rope_theta": 1e6, "rope_scaling": None}, (1e6, None)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, (1e7, None)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, (5e5, LLAMA3)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, (5e5, LLAMA3)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            (5e5, {"rope_type": "linear", "factor": 2.0}),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "mrope_section": [1],
                    "partial_rotary_factor": 0.25,
                }
            },
            (1e7, None),
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 9.0},
                    "sliding_attention": {"rope_theta": 3.0},
                }
            },
            (9.0, None),
        ),
    ],
)
def test_both_spellings_of_rope(
    config: dict[str, object], wanted: tuple[float, dict[str, object] | None]
) -> None:
    assert read_rope(config) == wanted


def test_rope_that_depends_on_the_texts_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="RoPE type 'dynamic' changes with the length"):
        read_rope({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "xdrope"])
def test_a_target_of_such_rope_can_have_a_drafter_that_turns_plainly(kind: str) -> None:
    target = raw_config(rope_theta=5e5, rope_scaling={"rope_type": kind, "factor": 2.0})
    with pytest.raises(ConfigError, match=r"say drafter\.rope_theta"):
        drafter_config(DrafterSection(layers=2), target, 7)
    made = drafter_config(DrafterSection(layers=2, rope_theta=1e6), target, 7)
    assert made.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_a_drafter_of_another_target_is_refused_by_name_and_shape() -> None:
    made = drafter_config(DrafterSection(layers=2), raw_config(), 7)
    check_pair(made, raw_config(), "drafter", "target")
    other = raw_config(hidden_size=96, vocab_size=600, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ConfigError) as caught:
        check_pair(made, other, "runs/a/checkpoints/step-1", "models/b")
    text = str(caught.value)
    assert "models/b (Qwen3ForCausalLM)" in text and "runs/a/checkpoints/step-1" in text
    assert "hidden_size 64 there, 96 here" in text and "vocab_size 500 there, 600 here" in text


def test_mask_token_and_vocabulary_must_fit_the_embedding() -> None:
    ids = {"a": 3, "<|mask|>": 11}
    assert mask_token_id(DrafterSection(mask_token="<|mask|>"), ids, 12) == 11
    assert mask_token_id(DrafterSection(mask_token_id=5), {}, 12) == 5
    with pytest.raises(ConfigError, match="no token '<mask>'"):
        mask_token_id(DrafterSection(mask_token="<mask>"), ids, 12)
    with pytest.raises(ConfigError, match="mask token id 12 is outside the target's embedding of 12 rows"):
        mask_token_id(DrafterSection(mask_token_id=12), {}, 12)
    check_tokenizer(ids, 12, "tokenizer.json")  # fewer tokens than rows, the largest id just inside
    with pytest.raises(ConfigError) as caught:
        check_tokenizer(ids, 11, "tokenizer.json")  # two tokens only, but one without a row
    assert "2 tokens have ids up to 11 ('<|mask|>')" in str(caught.value)
    assert "embedding only 11 rows" in str(caught.value) and "tokenizer.json" in str(caught.value)


def test_a_target_that_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no target there"):
        read_config(tmp_path)
    folder = save_target(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing, model\.layers\.3\.mlp\.up_proj\.weight"):
        load_target(folder, TAPS, torch.float32, torch.device("cpu"))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="transformers cannot load the target"):
        load_target(folder, TAPS, torch.float32, torch.device("cpu"))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not a JSON file"):
        read_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 300},
            r"embed_tokens\.weight is \(258, 32\), by config\.json it should be \(300, 32\)",
        ),
        ({"hidden_size": 40}, r"is \(.*32.*\), by config\.json it should be \(.*40.*\)"),
        ({"num_hidden_layers": 7}, r"`num_hidden_layers` \(7\) must be equal .* `layer_types` \(6\)"),
        ({"layer_types": ["full_attention"] * 5 + ["strange"]}, r"The `layer_types` entries must be in"),
        (
            {"num_hidden_layers": 7, "layer_types": ["full_attention"] * 7},
            r"11 weights are missing, model\.layers\.6",
        ),
    ],
)
def test_a_configuration_that_its_weights_do_not_have(
    saved_target: Path, changes: dict[str, object], message: str
) -> None:
    path = saved_target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_target(saved_target, TAPS, torch.float32, torch.device("cpu"))
    assert str(saved_target) in str(caught.value)


def test_the_text_part_of_a_nested_configuration_is_read(tmp_path: Path) -> None:
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    read = read_config(tmp_path)
    assert read["hidden_size"] == 8 and read["architectures"] == ["Qwen3_5ForConditionalGeneration"]
