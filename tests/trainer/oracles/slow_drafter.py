"""The drafter as arithmetic on single tokens and heads, for one block of one document.

Takes the published weights by name, works in the precision that it is given (the tests use float64), and is
plain enough for autograd to go through it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    groups: int
    eps: float
    theta: float
    windows: tuple[int | None, ...]  # one a layer; None: full attention


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE: component i and component i + E/2 turn together by position * theta^(-2i/E). x: [heads, E]."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-2 * torch.arange(half, dtype=x.dtype) / x.shape[-1])
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )


def key_value(
    w: dict[str, Tensor], shape: Shape, layer: int, x: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Key and value [G, E] of one token."""
    at = f"layers.{layer}.self_attn."
    k = (w[at + "k_proj.weight"] @ x).view(shape.groups, -1)
    v = (w[at + "v_proj.weight"] @ x).view(shape.groups, -1)
    return turned(normed(k, w[at + "k_norm.weight"], shape.eps), position, shape.theta), v


def attention(
    w: dict[str, Tensor],
    shape: Shape,
    layer: int,
    x: Tensor,
    slot: int,
    start: int,
    past: list[tuple[Tensor, Tensor]],
    block: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """One slot's attention over the tokens before `start` and the slots of its own block."""
    at = f"layers.{layer}.self_attn."
    window = shape.windows[layer]
    q = (w[at + "q_proj.weight"] @ x).view(shape.heads, -1)
    q = turned(normed(q, w[at + "q_norm.weight"], shape.eps), start + slot, shape.theta)
    if window is None:
        seen = past + block
    else:
        seen = [pair for place, pair in enumerate(past) if place > start + slot - window]
        seen = seen + block[: slot + 1]
    keys, values = torch.stack([k for k, _ in seen]), torch.stack([v for _, v in seen])  # [T, G, E]
    out = []
    for head in range(shape.heads):
        group = head * shape.groups // shape.heads
        scores = keys[:, group] @ q[head] / math.sqrt(q.shape[-1])
        out.append(scores.softmax(0) @ values[:, group])
    return w[at + "o_proj.weight"] @ torch.cat(out)


def mlp(w: dict[str, Tensor], layer: int, x: Tensor) -> Tensor:
    at = f"layers.{layer}.mlp."
    gate = w[at + "gate_proj.weight"] @ x
    return w[at + "down_proj.weight"] @ (gate * gate.sigmoid() * (w[at + "up_proj.weight"] @ x))


def draft(w: dict[str, Tensor], shape: Shape, taps: Tensor, embedded: Tensor) -> Tensor:
    """[B, H], what the target's head reads, for the block that starts right after the tokens of `taps`.

    Args:
        taps: [start, K * H] the target's states of all tokens before the block, and of no other.
        embedded: [B, H] the target's embedding of anchor, mask, mask, ...
    """
    start = len(taps)
    context = [normed(w["fc.weight"] @ state, w["hidden_norm.weight"], shape.eps) for state in taps]
    x = list(embedded)
    for layer in range(shape.layers):
        before, behind = (
            f"layers.{layer}.input_layernorm.weight",
            f"layers.{layer}.post_attention_layernorm.weight",
        )
        past = [key_value(w, shape, layer, state, place) for place, state in enumerate(context)]
        inner = [normed(token, w[before], shape.eps) for token in x]
        block = [key_value(w, shape, layer, token, start + slot) for slot, token in enumerate(inner)]
        x = [
            token + attention(w, shape, layer, inner[slot], slot, start, past, block)
            for slot, token in enumerate(x)
        ]
        x = [token + mlp(w, layer, normed(token, w[behind], shape.eps)) for token in x]
    return torch.stack([normed(token, w["norm.weight"], shape.eps) for token in x])
