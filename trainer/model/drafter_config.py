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
from trainer.model.target_identity import TargetIdentity

# RoPE types whose frequencies do not depend on the length of the text at hand (that would be a data-dependent
# step).
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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


def read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling (None: plain) from either spelling of RoPE in a model's config.json.

    A target's partial rotation and its multimodal sections are its own affair: the drafter rotates whole
    heads.
    """
    parameters = config.get("rope_parameters") or {}
    # Models with different attention kinds may hold one set per kind; full attention is the drafter's.
    parameters = parameters.get("full_attention", parameters)
    scaling = dict(config.get("rope_scaling") or {})
    merged = {**scaling, **parameters}
    theta = float(merged.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0)
    kind = merged.get("rope_type") or merged.pop("type", None) or "default"
    if kind in ("default", "mrope"):
        return theta, None
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"RoPE type {kind!r} changes with the length of the text",
            where="rope_parameters.rope_type",
            next=f"give the drafter one of {', '.join(ROPE_TYPES)}",
        )
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
    block_sizes = {size for size in (data.get("block_size"), own.get("block_size")) if size is not None}
    if len(block_sizes) != 1:
        raise ConfigError(f"block_size is said {len(block_sizes)} times: {sorted(block_sizes)}", where=where)
    number = _Numbers(data, where)
    layers, heads = number("num_hidden_layers"), number("num_attention_heads")
    layer_types = _layer_types(data, own, layers, where)
    taps = own.get("target_layer_ids")
    if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
        raise ConfigError(f"dflash_config.target_layer_ids is {taps!r}, not a list of layers", where=where)
    theta, scaling = read_rope(data)
    return DrafterConfig(
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=number("num_key_value_heads"),
        head_dim=data.get("head_dim") or number("hidden_size") // heads,
        vocab_size=number("vocab_size"),
        block_size=block_sizes.pop(),
        num_target_layers=number("num_target_layers"),
        taps=tuple(taps),
        mask_token_id=_Numbers(own, f"{where}: dflash_config")("mask_token_id", low=0),
        layer_types=layer_types,
        sliding_window=number("sliding_window") if "sliding_attention" in layer_types else None,
        rms_norm_eps=data.get("rms_norm_eps", 1e-6),
        max_position_embeddings=data.get("max_position_embeddings", 32768),
        attention_bias=data.get("attention_bias", False),
        rope_theta=theta,
        rope_scaling=scaling,
        initializer_range=data.get("initializer_range", 0.02),
        bos_token_id=data.get("bos_token_id"),
        eos_token_id=data.get("eos_token_id"),
        pad_token_id=data.get("pad_token_id"),
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
        raise ConfigError(
            "no drafter there", where=str(path), next="name a step-* folder of checkpoints/"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a JSON file: {error}", where=str(path)) from None


@dataclass(frozen=True)
class _Numbers:
    """Reads integers, and refuses what is none by its key."""

    data: Mapping[str, Any]
    where: str

    def __call__(self, key: str, low: int = 1) -> int:
        if key not in self.data:
            raise ConfigError(f"key {key!r} is missing", where=self.where)
        value = self.data[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{key} is {value!r}, not a number from {low}", where=self.where)
        return value


def _layer_types(data: Mapping[str, Any], own: Mapping[str, Any], layers: int, where: str) -> tuple[str, ...]:
    """One a layer, and no other key that makes them something else."""
    types = tuple(data.get("layer_types") or ["full_attention"] * layers)
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
    causal = own.get("causal", data.get("is_causal"))
    if causal is not None and {bool(causal)} != {name == "sliding_attention" for name in types}:
        raise ConfigError(
            f"blocks are said to be causal: {causal}; here sliding layers are, and full ones are not",
            where=f"{where}: is_causal",
        )
    return types
