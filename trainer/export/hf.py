"""z-lab's layout, which z-lab's code, SGLang and vLLM load: the drafter's own tensors beside a Qwen3-like
config.json. Writing it is `DrafterConfig.to_json`; reading one of somebody else's is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError
from trainer.model.drafter_config import DrafterConfig, from_json

ARCHITECTURE = "DFlashDraftModel"
# Keys, at the top level or in dflash_config, that make another model of the same tensors, and the values that
# do not. A drafter that is read without them drafts, and foretells nothing.
PLAIN: dict[str, tuple[Any, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "conv_group_size": (0,),
    "conv_kernel_size": (0,),
    "emb_dim": (),
    "final_logit_softcapping": (0,),
    "gru_hidden_dim": (),
    "hidden_act": ("silu",),
    "input_embedding_scale": (1,),
    "is_neox_style": (True,),
    "logit_scale": (1,),
    "output_multiplier": (1,),
    "projector_type": ("dflash",),
    "pure_draft_prefix_len": (),
    "query_zero_predicts_next": (False,),
    "quantization_config": (),
    "rope_is_neox_style": (True,),
    "sample_from_anchor": (False,),
    "selector_rank": (0,),
    "selector_top_k": (0,),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
    "use_gemma_norm": (False,),
    "use_swa": (False,),
}


def check_plain(data: Mapping[str, Any], where: str) -> None:
    """Refuse the configuration of a variant of the method that this trainer does not have.

    Raises:
        ConfigError: the key and its value.
    """
    names = data.get("architectures") or [ARCHITECTURE]
    if ARCHITECTURE not in names:
        raise ConfigError(f"architectures is {names}, not {ARCHITECTURE}", where=where)
    if data.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(f"model_type is {data['model_type']!r}; drafters are of type 'qwen3'", where=where)
    own = data.get("dflash_config")
    for part, values in (("", data), ("dflash_config.", own if isinstance(own, Mapping) else {})):
        for key, plain in PLAIN.items():
            value = values.get(key)
            if value is not None and value not in plain:
                raise ConfigError(
                    f"{part}{key} is {value!r}: a variant that this trainer does not have",
                    where=where,
                    next="import a plain DFlash drafter",
                )
        for key, twin in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
            value = values.get(key)
            if value is not None and value != data.get(twin):
                raise ConfigError(
                    f"{part}{key} is {value!r}, {twin} {data.get(twin)!r}; they must be the same here",
                    where=where,
                )
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    # Some configurations carry their target's partial rotation along; rope_dim then says what was trained.
    partial = rope.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    width = rope.get("rope_dim")
    if width not in (None, data.get("head_dim")):
        raise ConfigError(f"rope_dim is {width!r}: drafters here rotate whole heads", where=where)
    if width is None and partial not in (None, 1):
        raise ConfigError(
            f"partial_rotary_factor is {partial!r}: drafters here rotate whole heads",
            where=where,
            next="if this one does, too, take the key out: it was copied from the target",
        )


def read_hf(data: Mapping[str, Any], target_layers: int | None, where: str) -> DrafterConfig:
    """The drafter that a config.json in z-lab's layout describes.

    Args:
        target_layers: for a config.json without num_target_layers, which only some readers need.
    Raises:
        ConfigError: a key is missing, contradicts another, or makes it another kind of model.
    """
    check_plain(data, where)
    if data.get("num_target_layers") is None and target_layers is not None:
        data = {**data, "num_target_layers": target_layers}
    return from_json(data, where)
