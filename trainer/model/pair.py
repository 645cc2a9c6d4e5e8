"""Building a drafter for a target, and refusing a pair that cannot work, before any weights load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.model.drafter_config import DrafterConfig, read_rope
from trainer.model.taps import check_taps, default_taps
from trainer.model.target_identity import TargetIdentity, identify
from trainer.sections import Drafter as DrafterSection


def mask_token_id(section: DrafterSection, token_ids: Mapping[str, int], vocabulary: int) -> int:
    """The id of the mask token: a row that exists in the target's embedding, for the drafter ships none.

    Args:
        token_ids: the tokenizer's vocabulary; consulted only when the recipe names a token.
    """
    found = section.mask_token_id
    if found is None:
        assert section.mask_token is not None  # trainer.config asks for one of the two
        if section.mask_token not in token_ids:
            raise ConfigError(
                f"the target's tokenizer has no token {section.mask_token!r}",
                where="train.drafter.mask_token",
                next="name another token, or give drafter.mask_token_id",
            )
        found = token_ids[section.mask_token]
    if found >= vocabulary:
        raise ConfigError(
            f"mask token id {found} is outside the target's embedding of {vocabulary:,} rows",
            where="train.drafter.mask_token_id",
            next=f"use an unused id below {vocabulary:,}",
        )
    return found


def check_tokenizer(token_ids: Mapping[str, int], vocabulary: int, where: str) -> None:
    """The tokenizer may be smaller than the embedding (padded rows), but give no id without a row.

    Args:
        token_ids: the tokenizer's whole vocabulary, added tokens too.
    """
    token, largest = max(token_ids.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer's {len(token_ids):,} tokens have ids up to {largest:,} ({token!r}), the target's "
            f"embedding only {vocabulary:,} rows",
            where=where,
            next="the tokenizer and the model of the target do not belong together",
        )


def dimension(target: Mapping[str, Any], key: str) -> int:
    """A number that every decoder's config.json must say.

    Raises:
        ConfigError: it does not.
    """
    value = target.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{key} is missing" if value is None else f"{key} is {value!r}, not a positive number",
            where="the target's config.json",
            next="name the folder of a decoder that transformers loads",
        )
    return value


def _intermediate_size(section: DrafterSection, target: Mapping[str, Any]) -> int:
    """The recipe's, else the target's; a target whose layers are all experts has none to take over."""
    if section.intermediate_size is None and target.get("intermediate_size") is None:
        raise ConfigError(
            "the target's config.json has no intermediate_size for the drafter to take over",
            where="train.drafter.intermediate_size",
            next="name the drafter's own, for instance three times the hidden size",
        )
    return section.intermediate_size or dimension(target, "intermediate_size")


def drafter_config(
    section: DrafterSection, target: Mapping[str, Any], mask_id: int, identity: TargetIdentity | None = None
) -> DrafterConfig:
    """The drafter's shape: the recipe's wishes, else the target's own dimensions.

    Args:
        target: the target's config.json (text part).
        identity: which target this is, for `check_pair` later on.
    """
    layers, hidden = dimension(target, "num_hidden_layers"), dimension(target, "hidden_size")
    taps = section.taps
    if taps is None:
        taps = default_taps(layers, section.tap_count or section.layers)
    theta, scaling = _rope(section, target)
    heads = section.attention_heads or dimension(target, "num_attention_heads")
    groups = section.key_value_heads or int(target.get("num_key_value_heads") or heads)
    if heads % groups:
        raise ConfigError(
            f"{heads} attention heads cannot share {groups} key/value heads",
            where="train.drafter.attention_heads",
        )
    head_dim = section.head_dim or target.get("head_dim") or hidden // heads
    if int(head_dim) % 2:
        raise ConfigError(
            f"{head_dim} is odd, and RoPE turns the numbers of a head in pairs",
            where="train.drafter.head_dim",
        )
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=_intermediate_size(section, target),
        num_hidden_layers=section.layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=int(head_dim),
        vocab_size=dimension(target, "vocab_size"),
        block_size=section.block_size,
        num_target_layers=layers,
        taps=tuple(check_taps(taps, layers)),
        mask_token_id=mask_id,
        layer_types=tuple(section.layer_types or ["full_attention"] * section.layers),
        sliding_window=section.sliding_window,
        rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(target.get("max_position_embeddings", 32768)),
        rope_theta=theta,
        rope_scaling=scaling,
        bos_token_id=_single(target.get("bos_token_id")),
        eos_token_id=_single(target.get("eos_token_id")),
        pad_token_id=_single(target.get("pad_token_id")),
        target=identity or TargetIdentity(),
    )


def _rope(section: DrafterSection, target: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling: the target's, with the recipe's theta if it says one.

    Raises:
        ConfigError: the target's kind is not for drafters, and the recipe says no theta for a plain one.
    """
    try:
        theta, scaling = read_rope(target, "the target's config.json")
    except ConfigError as error:
        if section.rope_theta is not None:
            return section.rope_theta, None
        raise ConfigError(
            error.what,
            where=error.where,
            next="say drafter.rope_theta: the drafter then turns by it, without the target's scaling",
        ) from None
    return section.rope_theta or theta, scaling


def _single(token: Any) -> int | None:
    return token[0] if isinstance(token, list) else token


def check_pair(drafter: DrafterConfig, target: Mapping[str, Any], drafter_at: str, target_at: str) -> None:
    """Refuse a drafter that was made for another target: by its shape, and by what it says of its own target.

    Reads the target's tokenizer and one small tensor, and loads no weights. Published drafters say nothing of
    their target but its shape.

    Args:
        target: the target's config.json (text part), in the folder `target_at`.
    Raises:
        ConfigError: names both, and everything that differs.
    """
    wanted = {
        "hidden_size": drafter.hidden_size,
        "num_hidden_layers": drafter.num_target_layers,
        "vocab_size": drafter.vocab_size,
    }
    differs = [
        f"{key} {value:,} there, {dimension(target, key):,} here"
        for key, value in wanted.items()
        if dimension(target, key) != value
    ]
    here = identify(Path(target_at), target)
    differs += drafter.target.differences(here)
    if differs:
        raise ConfigError(
            f"this drafter was made for {drafter.target}, not for {target_at} ({here.kind}): "
            + "; ".join(differs),
            where=drafter_at,
            next="give the target that it was trained with",
        )
    check_taps(drafter.taps, dimension(target, "num_hidden_layers"))
    if drafter.mask_token_id >= dimension(target, "vocab_size"):
        raise ConfigError(
            f"mask token id {drafter.mask_token_id} is outside the target's embedding", where=drafter_at
        )
