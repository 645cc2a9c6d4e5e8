"""The drafter's shape, and the config.json in which z-lab's code, SGLang and vLLM read it. Needs no torch.

Each reader takes some facts from different keys, so several are written twice on purpose: the block size at
the top level and in dflash_config, RoPE in the spelling of transformers 4 (rope_theta, rope_scaling) and of
transformers 5 (rope_parameters).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.model import target_identity
from trainer.model.numbers import Numbers
from trainer.model.target_identity import TargetIdentity

# RoPE types whose frequencies do not depend on the length of the text at hand (that would be a data-dependent
# step).
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_NUMBERS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class DrafterConfig:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    num_target_layers: int
    taps: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None  # None: the plain kind
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    target: TargetIdentity = field(default_factory=TargetIdentity)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """RoPE in transformers 5's spelling."""
        return {**(self.rope_scaling or {"rope_type": "default"}), "rope_theta": self.rope_theta}

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer reaches back over, itself included; None: all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def to_json(self, dtype: str = "float32") -> dict[str, Any]:
        """Content of config.json."""
        slides = "sliding_attention" in self.layer_types
        return {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "bos_token_id": self.bos_token_id,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.taps),
                **({"target_identity": self.target.to_json()} if self.target != TargetIdentity() else {}),
            },
            "dtype": dtype,
            "eos_token_id": self.eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "pad_token_id": self.pad_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope_parameters,
            "rope_scaling": dict(self.rope_scaling) if self.rope_scaling else None,
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window if slides else None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": slides,
            "vocab_size": self.vocab_size,
        }


def read_rope(config: Mapping[str, Any], where: str = "config.json") -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling (None: plain) from either spelling of RoPE in a model's config.json.

    A target's partial rotation and its multimodal sections are its own affair: the drafter rotates whole
    heads.

    Raises:
        ConfigError: a kind that changes with the text's length, or one whose numbers are missing or none.
    """
    parts = {key: config.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, part in parts.items():
        if not isinstance(part, Mapping):
            raise ConfigError(f"{key} is {part!r}, not keys and values", where=where)
    # Models with different attention kinds may hold one set per kind; full attention is the drafter's.
    parameters = parts["rope_parameters"].get("full_attention", parts["rope_parameters"])
    merged = {**parts["rope_scaling"], **parameters}
    numbers = Numbers(
        {**merged, "rope_theta": merged.pop("rope_theta", None) or config.get("rope_theta")}, where
    )
    theta = float(numbers.real("rope_theta", default=10_000.0))
    kind = merged.get("rope_type") or merged.pop("type", None) or "default"
    if kind in ("default", "mrope"):
        return theta, None
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"RoPE type {kind!r} changes with the length of the text",
            where=f"{where}: rope_parameters.rope_type",
            next=f"drafters here have one of {', '.join(ROPE_TYPES)}",
        )
    for key in ROPE_NUMBERS[kind]:
        numbers.real(key)
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        merged.pop(key, None)
    return theta, {**merged, "rope_type": kind}


def from_json(data: Any, where: str = "config.json") -> DrafterConfig:
    """The shape that a drafter's config.json describes.

    Raises:
        ConfigError: a key is missing or no number, keys contradict each other, or a layer type is unknown.
    """
    if not isinstance(data, Mapping):
        raise ConfigError("not the configuration of a drafter: keys and values are expected", where=where)
    own = data.get("dflash_config", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"dflash_config is {own!r}, not keys and values", where=where)
    number, inner = Numbers(data, where), Numbers(own, f"{where}: dflash_config")
    block_sizes = {
        each("block_size", 2) for each in (number, inner) if each.data.get("block_size") is not None
    }
    if not block_sizes:
        raise ConfigError(
            "no block_size, so not the configuration of a drafter",
            where=where,
            next="name a drafter's folder, such as a step-* of checkpoints/; a target's is for --target",
        )
    if len(block_sizes) != 1:
        raise ConfigError(f"block_size is said {len(block_sizes)} times: {sorted(block_sizes)}", where=where)
    (block_size,) = block_sizes
    layers, vocabulary, target_layers = (
        number("num_hidden_layers"),
        number("vocab_size"),
        number("num_target_layers"),
    )
    heads, groups = number("num_attention_heads"), number("num_key_value_heads")
    if heads % groups:
        raise ConfigError(f"{heads} attention heads cannot share {groups} key/value heads", where=where)
    given = data.get("head_dim") is not None
    head_dim = number("head_dim", 2) if given else number("hidden_size") // heads
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}, and RoPE turns numbers in pairs", where=where)
    layer_types = _layer_types(data, own, layers, where)
    window = number("sliding_window") if "sliding_attention" in layer_types else None
    mask_token_id = inner("mask_token_id", low=0)
    if mask_token_id >= vocabulary:
        raise ConfigError(
            f"mask token id {mask_token_id} is outside the target's embedding of {vocabulary:,} rows",
            where=inner.where,
        )
    theta, scaling = read_rope(data, where)
    return DrafterConfig(
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=vocabulary,
        block_size=block_size,
        num_target_layers=target_layers,
        taps=_taps(own.get("target_layer_ids"), target_layers, where),
        mask_token_id=mask_token_id,
        layer_types=layer_types,
        sliding_window=window,
        rms_norm_eps=number.real("rms_norm_eps", default=1e-6),
        max_position_embeddings=number("max_position_embeddings", default=32768),
        attention_bias=number.flag("attention_bias"),
        rope_theta=theta,
        rope_scaling=scaling,
        initializer_range=number.real("initializer_range", default=0.02),
        bos_token_id=number.token("bos_token_id"),
        eos_token_id=number.token("eos_token_id"),
        pad_token_id=number.token("pad_token_id"),
        target=target_identity.from_json(own.get("target_identity"), f"{where}: dflash_config"),
    )


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The shape of the drafter in `folder`, without its weights.

    Raises:
        ConfigError: no drafter there, or not a readable one.
    """
    path = folder / "config.json"
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        best = folder / "checkpoints" / "best"
        hint = f"name {best}" if best.is_dir() else "name a step-* folder of checkpoints/"
        raise ConfigError("no drafter there", where=str(path), next=hint) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a JSON file: {error}", where=str(path)) from None


def _taps(said: Any, target_layers: int, where: str) -> tuple[int, ...]:
    """Layers of the target, counted from 0; `trainer.model.taps.check_taps` says which of them serve."""
    if not isinstance(said, list) or not said or not all(type(tap) is int for tap in said):
        raise ConfigError(f"dflash_config.target_layer_ids is {said!r}, not a list of layers", where=where)
    if not all(0 <= tap < target_layers for tap in said):
        raise ConfigError(
            f"dflash_config.target_layer_ids is {said}, and the target has layers 0 to {target_layers - 1}",
            where=where,
        )
    return tuple(said)


def _layer_types(data: Mapping[str, Any], own: Mapping[str, Any], layers: int, where: str) -> tuple[str, ...]:
    """One a layer, and no other key that makes them something else."""
    said = data.get("layer_types") or _transformers_types(data, layers, where)
    if not isinstance(said, list):
        raise ConfigError(f"layer_types is {said!r}, not a list", where=where)
    types = tuple(said)
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"unknown layer type {name!r}", where=f"{where}: layer_types")
    if len(types) != layers:
        raise ConfigError(f"layer_types has {len(types)} names for {layers} layers", where=where)
    if "sliding_attention" in types and not data.get("use_sliding_window"):
        raise ConfigError(
            "layers slide, but use_sliding_window is not true: transformers then drops the window",
            where=where,
        )
    for key, causal in (
        ("is_causal", data.get("is_causal")),
        ("dflash_config.is_causal", own.get("is_causal")),
        ("dflash_config.causal", own.get("causal")),
    ):
        if causal is not None and {bool(causal)} != {name == "sliding_attention" for name in types}:
            raise ConfigError(
                f"blocks are said to be causal: {causal}; here sliding layers are, and full ones are not",
                where=f"{where}: {key}",
            )
    return types


def _transformers_types(data: Mapping[str, Any], layers: int, where: str) -> list[str]:
    """What transformers makes of a config.json without them: layers from max_window_layers on slide."""
    slides = data.get("use_sliding_window") and data.get("sliding_window")
    first = Numbers(data, where)("max_window_layers", low=0, default=28) if slides else layers
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
