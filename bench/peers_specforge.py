"""SpecForge's DFlash model, to be timed by bench/peers.py."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from peers_kit import GAMMA, Absent, Peer, qwen3_config, updated
from torch import nn

from trainer.bench.measure import Settings
from trainer.bench.shapes import SHAPES, Shape, batch_of, ends_of, tap_places
from trainer.data.batch import Batch


def wrapped_drafter(shape: Shape, width: int, device: torch.device) -> Any:
    """Its drafter in the module that its trainer calls: anchors, noise, masks, loss in chunks of 128 blocks.

    As its trainer has it, weights are bfloat16 on a GPU (the optimizer's are float32), attention is flex,
    compiled, and nothing else is. On a CPU attention is its eager one.

    Args:
        width: anchors a row.
    """
    if importlib.util.find_spec("specforge") is None:
        raise Absent("not importable here: put PYTHONPATH=/path/to/SpecForge in front (docs/performance.md)")
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    ends, attention = ends_of(shape, device), "flex_attention" if device.type == "cuda" else "eager"
    config = qwen3_config(shape, attention)
    config.block_size, config.num_target_layers = shape.block, shape.target_layers
    config.dflash_config = {"target_layer_ids": list(tap_places(shape)), "mask_token_id": 0}
    with device:
        drafter = DFlashDraftModel(config)
    head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, device="meta")
    head.weight = nn.Parameter(ends.head_weight, requires_grad=False)
    model = OnlineDFlashModel(
        drafter,
        head,
        ends.embedding,
        mask_token_id=0,
        block_size=shape.block,
        attention_backend=attention,
        num_anchors=width,
        loss_decay_gamma=GAMMA,
    )
    return model.to(ends.head_weight.dtype).train()


def gradients_of(model: Any, batch: Batch, size: int) -> None:
    """Forward and backward of the rows, `size` at a time; the average's gradients are left in the weights."""
    rows = batch.rows
    weight = torch.zeros((), device=rows.tokens.device)
    for start in range(0, len(rows.tokens), size):
        part = batch.part(slice(start, start + size))
        _, _, told = model(
            input_ids=part.rows.tokens,
            hidden_states=part.states.taps,
            loss_mask=part.rows.supervised.long(),
        )
        loss, share = told["loss_terms"]
        loss.backward()
        weight += share
    for parameter in model.draft_model.parameters():  # its trainer, too, divides the gradients of the sums
        parameter.grad.mul_(1 / weight)


def specforge(settings: Settings) -> Peer:
    """`settings.micro_rows` are the rows that it has at once, as its trainer's `accumulation_steps` would."""
    shape, device = SHAPES[settings.shape], settings.where
    model = wrapped_drafter(shape, settings.width, device)
    batch = batch_of(shape, settings.rows, settings.row_tokens, device)
    size = settings.micro_rows or settings.rows
    _, kept = model._sample_anchor_positions(settings.row_tokens, batch.rows.supervised.long(), device)
    step = updated(model, partial(gradients_of, model, batch, size), masters=True)
    return Peer(step, int(kept.sum()))
