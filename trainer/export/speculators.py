"""The layout of the `speculators` package, which `vllm serve FOLDER` loads by itself.

The same tensors under the same names, and the target's embedding and head beside them; config.json nests the
drafter's shape, names the target, and counts taps from 1: its id i is the state that enters layer i, which is
our tap i - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError
from trainer.export.hf import ARCHITECTURE, check_plain
from trainer.model.drafter_config import DrafterConfig, from_json

VERSION = "0.9.0"  # of speculators: its layout is this one
IDENTITY = "target_identity"
NOT_NESTED = ("architectures", "block_size", "dflash_config", "num_target_layers", "dtype")


def speculators_json(
    config: DrafterConfig, dtype: str, target: str, architectures: list[str]
) -> dict[str, Any]:
    """Content of config.json.

    Args:
        target: the name or folder under which readers find the target.
        architectures: the target's.
    """
    flat = config.to_json(dtype)
    body = {key: value for key, value in flat.items() if key not in NOT_NESTED}
    known = flat["dflash_config"].get(IDENTITY)
    return {
        "architectures": [ARCHITECTURE],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        # vLLM makes one switch for all layers of it, causal unless it is true. speculators itself asks it
        # about sliding layers only, so without any it is ours to set as vLLM needs it.
        "sliding_window_non_causal": "sliding_attention" not in config.layer_types,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": architectures, "name_or_path": target},
        },
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": body,
        **({IDENTITY: known} if known else {}),  # our own; readers pass over keys that they do not know
    }


def read_speculators(data: Mapping[str, Any], target_layers: int | None, where: str) -> DrafterConfig:
    """The drafter that a config.json in the layout of speculators describes.

    Args:
        target_layers: of the target; this layout does not say it.
    Raises:
        ConfigError: another algorithm, a pruned vocabulary, a missing key, or no `target_layers`.
    """
    kind = data.get("speculators_model_type")
    if kind != "dflash":
        raise ConfigError(f"speculators_model_type is {kind!r}, not 'dflash'", where=where)
    body, taps = data.get("transformer_layer_config"), data.get("aux_hidden_state_layer_ids")
    if not isinstance(body, Mapping):
        raise ConfigError("transformer_layer_config is missing", where=where)
    if not isinstance(taps, list) or not all(isinstance(tap, int) and tap >= 1 for tap in taps):
        raise ConfigError(f"aux_hidden_state_layer_ids is {taps!r}, not layers from 1", where=where)
    if target_layers is None:
        raise ConfigError(
            "this layout does not say how many layers the target has",
            where=where,
            next="name the target's folder with --target",
        )
    layer_types = body.get("layer_types") or []
    if "sliding_attention" in layer_types and data.get("sliding_window_non_causal"):
        raise ConfigError(
            "sliding_window_non_causal is true: here blocks in sliding layers are causal", where=where
        )
    flat = {
        **body,
        "model_type": "qwen3",  # whatever the target's: the layers are the same
        "architectures": [ARCHITECTURE],
        "block_size": data.get("block_size"),
        "dflash_config": {
            "mask_token_id": data.get("mask_token_id"),
            "target_layer_ids": [tap - 1 for tap in taps],
            IDENTITY: data.get(IDENTITY),
        },
        "draft_vocab_size": data.get("draft_vocab_size"),
        "num_target_layers": target_layers,
        "sample_from_anchor": data.get("sample_from_anchor"),
        "target_hidden_size": data.get("target_hidden_size"),
    }
    check_plain(flat, where)
    return from_json(flat, where)


def target_name(data: Mapping[str, Any]) -> str | None:
    """The target that a config.json of speculators names."""
    verifier = (data.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path")
    return name if isinstance(name, str) else None
