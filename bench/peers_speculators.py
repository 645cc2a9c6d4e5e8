"""The DFlash model of `speculators`, to be timed by bench/peers.py."""

from __future__ import annotations

import copy
import importlib.util
import sys

import torch
from peers_kit import GAMMA, Absent, Peer, qwen3_config, updated
from torch import Tensor, nn

from trainer.bench.measure import Settings
from trainer.bench.shapes import SHAPES, batch_of, tap_places


def mended_autotuners() -> None:
    """Its fused losses share one list of configurations, which torch 2.11 cannot have (pytorch#177600)."""
    fused = sys.modules.get("speculators.losses.fused")
    for kernel in vars(fused).values() if fused else ():
        if hasattr(kernel, "configs") and hasattr(kernel, "fn"):
            kernel.configs = copy.deepcopy(kernel.configs)


def speculators(settings: Settings, narrow: bool = False) -> Peer:
    """It reads one packed row, so our rows are that row's documents. It also projects the target's logits,
    for labels.

    Args:
        narrow: on a GPU bfloat16 weights, copies of the optimizer's float32 ones, instead of float32 under
            autocast: less memory, and no cast of a weight in the step.
    """
    if importlib.util.find_spec("speculators") is None:
        raise Absent("not installed: pip install --no-deps speculators==0.9.0")
    import speculators_package

    parts = ("losses.fused",) if settings.where.type == "cuda" else ()  # kernels
    package = speculators_package.load("losses.utils", "models.dflash.core", *parts)
    mended_autotuners()
    core, losses = sys.modules["speculators.models.dflash.core"], sys.modules["speculators.losses.utils"]
    shape, device = SHAPES[settings.shape], settings.where
    gpu = device.type == "cuda"
    config = package.DFlashSpeculatorConfig(
        transformer_layer_config=qwen3_config(shape, "simple_flex_attention" if gpu else "eager"),
        draft_vocab_size=shape.vocabulary,
        block_size=shape.block,
        aux_hidden_state_layer_ids=[tap + 1 for tap in tap_places(shape)],
        mask_token_id=0,
    )
    with device:
        model = package.DFlashDraftModel(config).train()
    if narrow and gpu:
        model = model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        owned = ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")
        parameter.requires_grad = not name.startswith(owned)
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    if not gpu:
        model._create_mask_fn = lambda *args, **kwargs: core.create_float_mask(
            *args, **kwargs, dtype=torch.float32
        )
    batch = batch_of(shape, settings.rows, settings.row_tokens, device)
    documents = torch.arange(settings.rows, device=device).repeat_interleave(settings.row_tokens)[None]

    def flat(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[None]

    taps, supervised = flat(batch.states.taps), flat(batch.rows.supervised).long()
    final, width = taps[..., : shape.hidden].contiguous(), settings.width * settings.rows
    loss_config = losses.resolve_loss_config("ce", "fused" if gpu else "eager")

    def backward() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            _, loss, _ = model(
                taps,
                flat(batch.rows.tokens),
                supervised,
                final,
                documents,
                flat(batch.rows.positions),
                loss_config=loss_config,
                gamma=GAMMA,
                max_anchors=width,
            )
        loss.backward()

    _, kept = core.select_anchors(supervised, width, shape.block)
    return Peer(updated(model, backward, masters=narrow), int(kept.sum()))
