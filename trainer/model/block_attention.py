"""Attention of blocks to their context and to themselves: our own GPU kernels behind one operation.

Flex attention asks for the keys of context and blocks in one tensor, and gives each of its programs 128
positions of one head: eight anchors, which lie 760 tokens apart where 512 are drawn from 49,152. Here a
program has few anchors with the heads that share a key, and reads context and blocks where they are
(attention_kernel.py); what it reads, attention_spans.py says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.model import attention_spans
from trainer.model.attention_spans import Spans, Tiles
from trainer.model.gpu_kernels import facts_here

LOG2_E = 1.4426950408889634
SIZES = (16, 32, 64, 128)  # of a head
ROOM = 1 << 17  # bytes of shared memory that the largest takes; an A6000, L40S or RTX gives 99 KiB


def why_not_here(device_type: str, dtype: torch.dtype, head_size: int) -> str | None:
    """What is in the way of the kernels; None: nothing."""
    if device_type != "cuda":
        return f"need a CUDA GPU, this runs on {device_type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"multiply 16-bit numbers, not {str(dtype).removeprefix('torch.')}"
    if head_size not in SIZES:
        return f"know heads of {', '.join(map(str, SIZES))} numbers, not {head_size}"
    return None


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, rule: Spans, scale: float
) -> Tensor:
    """Attention [R, Q, A, E]; zero for dead blocks, which also give no gradient.

    Args:
        q: [R, Q, A, E]. k, v: [R, S, G, E] of the context. own_k, own_v: [R, Q, G, E] of the blocks.
        rule: made for as many heads a key head as A / G. scale: of scores, before the softmax.
    """
    made: tuple[Tensor, Tensor] = _attend(
        *(each.contiguous() for each in (q, k, v, own_k, own_v)),
        rule.low,
        rule.high,
        rule.forward,
        rule.queries,
        rule.keys,
        rule.block_size,
        rule.causal,
        rule.pack,
        scale,
    )
    return made[0]


def _shape(q: Tensor, k: Tensor, block_size: int, causal: bool, pack: int) -> dict[str, Any]:
    return {
        "HEADS": q.shape[2],
        "GROUPS": k.shape[2],
        "SIZE": q.shape[3],
        "PACK": pack,
        "BLOCK": block_size,
        "CAUSAL": causal,
    }


def stages_of(tiles: Tiles, shared_bytes: int | None) -> int:
    """Loads under way at once, as far as a GPU has room for them.

    Args:
        shared_bytes: that it gives a program; None: unknown.
    """
    return tiles.stages if shared_bytes is None or shared_bytes >= ROOM else min(tiles.stages, 2)


def _of(tiles: Tiles) -> dict[str, Any]:
    stages = stages_of(tiles, facts_here().shared_bytes)
    return {"ROWS": tiles.rows, "KEYS": tiles.keys, "num_warps": tiles.warps, "num_stages": stages}


@torch.library.custom_op("dflash::block_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    low: Tensor,
    high: Tensor,
    forward_spans: Tensor,
    query_spans: Tensor,
    key_spans: Tensor,
    block_size: int,
    causal: bool,
    pack: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from trainer.model import attention_kernel

    rows, queries, heads, _ = q.shape
    out, logs = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    grid = (forward_spans.shape[1], heads // pack, rows)
    with torch.cuda.device_of(q):  # Triton launches on the thread's device, whatever the tensors' is
        attention_kernel.forward[grid](
            *(q, k, v, own_k, own_v, out, logs, low, high, forward_spans),
            *(scale * LOG2_E, queries, k.shape[1]),
            OWN=attention_spans.FORWARD.own,
            **_shape(q, k, block_size, causal, pack),
            **_of(attention_spans.FORWARD),
        )
    return out, logs


@_attend.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dflash::block_attention_backward", mutates_args=())
def _gradients(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    out: Tensor,
    logs: Tensor,
    low: Tensor,
    high: Tensor,
    query_spans: Tensor,
    key_spans: Tensor,
    block_size: int,
    causal: bool,
    pack: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from trainer.model import attention_kernel

    d_out = d_out.contiguous()
    rows, queries, heads, _ = q.shape
    shape = _shape(q, k, block_size, causal, pack)
    d_q, dots = torch.empty_like(q), torch.empty_like(logs)
    numbers = (scale * LOG2_E, scale, queries)
    with torch.cuda.device_of(q):
        attention_kernel.query_gradients[(query_spans.shape[1], heads // pack, rows)](
            *(q, k, v, own_k, own_v, out, d_out, logs, dots, d_q, low, high, query_spans),
            *(*numbers, k.shape[1]),
            OWN=attention_spans.QUERIES.own,
            **shape,
            **_of(attention_spans.QUERIES),
        )
    found = [d_q]
    for keys, values, own in ((k, v, False), (own_k, own_v, True)):
        tiles = attention_spans.KEYS._replace(keys=attention_spans.KEYS.own) if own else attention_spans.KEYS
        d_k, d_v = torch.empty_like(keys), torch.empty_like(values)
        with torch.cuda.device_of(q):
            attention_kernel.key_gradients[(-(-keys.shape[1] // tiles.keys), keys.shape[2], rows)](
                *(q, keys, values, d_out, logs, dots, d_k, d_v, low, high, key_spans),
                *(*numbers, keys.shape[1]),
                OWN=own,
                **shape,
                **_of(tiles),
            )
        found += [d_k, d_v]
    return found[0], found[1], found[2], found[3], found[4]


@_gradients.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, own_k, own_v = (torch.empty_like(each) for each in (q, k, v, own_k, own_v))
    return q, k, v, own_k, own_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block_size, ctx.causal, ctx.pack, ctx.scale = inputs
    q, k, v, own_k, own_v, low, high, _, query_spans, key_spans = tensors
    ctx.save_for_backward(q, k, v, own_k, own_v, *output, low, high, query_spans, key_spans)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_out: Tensor, d_logs: Tensor | None) -> tuple[Tensor | None, ...]:
    found = _gradients(d_out, *ctx.saved_tensors, ctx.block_size, ctx.causal, ctx.pack, ctx.scale)
    return *found, *[None] * 9


_attend.register_autograd(_backward, setup_context=_keep)
