"""The tensors of a drafter: names and shapes, from its configuration alone, and what is wrong with a set.

SGLang skips names that it does not know and does not notice missing ones, so nothing may leave or enter here
unchecked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.errors import ConfigError
from trainer.model.drafter_config import DrafterConfig

Shape = tuple[int, ...]
SHOWN = 8  # problems in one message; the rest is counted


def body_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor of the drafter itself: 11 a layer and 3 more (more with biases)."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, inner),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.k_norm.weight": (size,),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (size,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
    }
    if config.attention_bias:
        rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
        layer |= {f"self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
    shapes = {
        f"layers.{number}.{name}": shape
        for number in range(config.num_hidden_layers)
        for name, shape in layer.items()
    }
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes["fc.weight"] = (hidden, len(config.taps) * hidden)
    return shapes


def head_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """The target's embedding and head, which the speculators layout carries along."""
    shape = (config.vocab_size, config.hidden_size)
    return {"embed_tokens.weight": shape, "lm_head.weight": shape}


def problems(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Shape]) -> list[str]:
    """What differs, each by name and shape; empty when the sets are the same."""

    def text(shape: Sequence[int]) -> str:
        return str(list(shape))

    missing = [f"{name} {text(wanted[name])} is missing" for name in sorted(set(wanted) - set(found))]
    unknown = [f"{name} {text(found[name])} is not a drafter's" for name in sorted(set(found) - set(wanted))]
    wrong = [
        f"{name} has shape {text(found[name])}, not {text(wanted[name])}"
        for name in sorted(set(found) & set(wanted))
        if tuple(found[name]) != tuple(wanted[name])
    ]
    return missing + unknown + wrong


def check_names(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Shape], where: str) -> None:
    """Refuse a set of tensors that is not exactly the wanted one.

    Raises:
        ConfigError: names and shapes that differ.
    """
    wrong = problems(found, wanted)
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise ConfigError(
            "these are not the weights of the drafter that config.json describes:\n  "
            + "\n  ".join(wrong[:SHOWN] + more),
            where=where,
            next="take weights and config.json from the same checkpoint",
        )
