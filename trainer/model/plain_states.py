"""A target's hidden states as transformers itself gives them: what fast ways are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.tapped_model import TappedModel

# Relative: what narrow numbers and another order of adding may change, in a target of some layers
NEAR = 0.05
TIMES = 4  # as far as transformers' own two ways are apart may another right way be, with something to spare


def far(found: Tensor, wanted: Tensor) -> float:
    """Relative distance of two sets of states."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def allowed(noise: float) -> float:
    """The distance at which states still count as the same.

    Args:
        noise: the distance of what transformers gives for the same tokens with attention written out and
            with fused attention. Layer by layer rounding adds up: in bfloat16, after 60 layers of random
            weights, to 0.06 on an H200.
    """
    return max(NEAR, TIMES * noise)


@torch.no_grad()
def plain_states(target: TappedModel, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """By no code of ours: uncompiled, with attention written out under transformers' own mask.

    Args:
        tokens, positions: [R, S], one document a row.
    Returns:
        After the embedding and after each layer, [R, S, H] each, the last as the head reads it.
    """
    config, decoder = target.config, target.decoder
    hooks = {module: dict(module._forward_hooks) for module in target.model.modules()}
    before, config._attn_implementation = config._attn_implementation, "eager"
    try:
        output = decoder(input_ids=tokens, position_ids=positions, output_hidden_states=True, use_cache=False)
    finally:
        config._attn_implementation = before
        # transformers leaves hooks of its own in every layer, with which no layer can be compiled.
        for module, own in hooks.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(own)
        decoder._output_capturing_hooks_installed = False
    found: tuple[Tensor, ...] = output.hidden_states
    return found
