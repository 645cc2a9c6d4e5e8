"""How many positions a target knows: what it says beyond them is worth nothing. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def positions(config: Mapping[str, Any]) -> int | None:
    """The longest text of a model, by its config.json (text part); None where that does not say.

    Some name the length before RoPE is stretched, some the one after it.
    """
    most = config.get("max_position_embeddings") or config.get("n_positions")
    if type(most) is not int:
        return None
    parts = [
        part for part in map(config.get, ("rope_scaling", "rope_parameters")) if isinstance(part, Mapping)
    ]
    stretched = [most]
    for part in parts:
        rope = part.get("full_attention", part)
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or most
        if isinstance(factor, int | float) and type(original) is int:
            stretched.append(int(factor * original))
    return max(stretched)
