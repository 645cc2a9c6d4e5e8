"""Training that begins with a drafter that is there: an imported one, or a checkpoint of another run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.drafter import load_drafter
from trainer.errors import ConfigError
from trainer.model.drafter import Drafter
from trainer.model.drafter_config import DrafterConfig
from trainer.model.pair import check_pair
from trainer.model.target_identity import TargetIdentity
from trainer.sections import Drafter as DrafterSection


def begin_with(
    section: DrafterSection, mask_id: int, identity: TargetIdentity, target: Mapping[str, Any], target_at: str
) -> Drafter:
    """The drafter in `init_from`, weights and shape; what the recipe says of its shape must be so.

    Args:
        mask_id: the recipe's mask token.
        identity: of the target to train for.
        target: its config.json (text part), in the folder `target_at`.
    Raises:
        ConfigError: no drafter there, one for another target, or of another shape than the recipe says.
    """
    assert section.init_from is not None  # trainer.config asks for it
    folder = Path(section.init_from)
    made = load_drafter(folder)
    check_pair(made.config, target, str(folder), target_at)
    differs = [
        f"train.drafter.{key}: {mine} in the recipe, {theirs} in {folder}"
        for key, mine, theirs in _told(section, mask_id, made.config)
        if mine is not None and mine != theirs
    ]
    if differs:
        raise ConfigError("\n".join(differs), next="let the recipe say what the drafter is")
    made.config = dataclasses.replace(made.config, target=identity)
    return made


def _told(section: DrafterSection, mask_id: int, shape: DrafterConfig) -> list[tuple[str, Any, Any]]:
    """Each key of the recipe that tells of the shape: its value there (None: left open) and the drafter's."""
    return [
        ("layers", section.layers, shape.num_hidden_layers),
        ("block_size", section.block_size, shape.block_size),
        ("mask_token_id", mask_id, shape.mask_token_id),
        ("taps", section.taps, list(shape.taps)),
        ("tap_count", section.tap_count, len(shape.taps)),
        ("layer_types", section.layer_types, list(shape.layer_types)),
        ("sliding_window", section.sliding_window, shape.sliding_window),
        ("intermediate_size", section.intermediate_size, shape.intermediate_size),
        ("attention_heads", section.attention_heads, shape.num_attention_heads),
        ("key_value_heads", section.key_value_heads, shape.num_key_value_heads),
        ("head_dim", section.head_dim, shape.head_dim),
        ("rope_theta", section.rope_theta, shape.rope_theta),
    ]


def recipe_lines(folder: Path, config: DrafterConfig) -> str:
    """The `drafter:` section of a recipe that begins with the drafter in `folder`."""
    values = {
        "init": "drafter",
        "init_from": folder,
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
    }
    return "drafter: {" + ", ".join(f"{key}: {value}" for key, value in values.items()) + "}"
