"""A target's hidden states as transformers itself gives them: what fast ways are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.target import Target


@torch.no_grad()
def plain_states(target: Target, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
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
