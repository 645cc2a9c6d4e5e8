"""The drafter: a small Qwen3-style decoder whose attention also reads the target's hidden states.

Rows R, context tokens C, block tokens Q (N blocks of B), hidden H, taps K, heads A, key/value heads G, head
size E.

The context enters every layer as it is (after `fc` and `hidden_norm`, without the layer's own input norm),
through the same k_proj and v_proj as the block's tokens, and no layer changes it. So its keys and values can
be kept while
decoding: `context_keys_values` computes them, `forward` takes them. Embedding and head are the target's,
frozen, and are not part of this module. Parameter names are those of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from trainer.model.attention_spans import Spans
from trainer.model.block_attention import block_attention
from trainer.model.drafter_config import DrafterConfig
from trainer.model.flex import flex
from trainer.model.norm_rope import norm_rope, runs_here

MOST_SCORES = 1 << 26  # attention scores that may be held in memory at once
KeyValue = tuple[Tensor, Tensor]  # keys rotated and normed, values; each [R, G, C, E]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 at least and given in x's dtype, so that what runs through the
    layers stays as narrow as the products are.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (self.weight * F.rms_norm(wide, (x.shape[-1],), eps=self.eps)).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [R, T, heads, E] with cos and sin [R, T, E], halves paired as (first, second); in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos[:, :, None] + turned * sin[:, :, None]).to(x.dtype)


def normed_rotated(x: Tensor, norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [R, T, heads, E] as attention takes them: normed, then rotated."""
    if runs_here(x):
        return norm_rope(x, norm.weight, norm.eps, cos, sin)
    return rotate(norm(x), cos, sin)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    """Attention [R, A, Q, E] under a dense boolean mask [R, 1, Q, T] or flex attention's BlockMask.

    A query that sees nothing (a dead block's) gets zero, and gives no gradient.
    """
    grouped = q.shape[1] != k.shape[1]
    if not isinstance(mask, Tensor):
        return flex(q, k, v, mask, scale, grouped)
    alive = mask.any(-1, keepdim=True)
    mask = mask | ~alive  # a softmax over no key at all is NaN in some kernels
    if not q.is_cuda and mask.numel() * q.shape[1] <= MOST_SCORES:
        out = _attend_by_groups(q, k, v, mask, scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out * alive


def _attend_by_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Two batched products with all scores in memory; heads of one group share a product.

    On a CPU, at the demo's shape, forward and backward take half the time of torch's fused attention, whose
    backward works head by head.
    """
    rows, heads, queries, size = q.shape
    groups, keys = k.shape[1], k.shape[2]
    each = heads // groups
    # Far below any score, so that hidden keys weigh nothing.
    hidden = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -1e30)
    hidden = hidden[:, :, None].expand(rows, groups, each, queries, keys)
    scores = torch.baddbmm(
        hidden.reshape(rows * groups, each * queries, keys),
        q.reshape(rows * groups, each * queries, size),
        k.reshape(rows * groups, keys, size).transpose(1, 2),
        alpha=scale,
    )
    out = scores.softmax(-1) @ v.reshape(rows * groups, keys, size)
    return out.view(rows, heads, queries, size)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = size
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[R, T, heads, E]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        k = normed_rotated(self.heads(self.k_proj(x)), self.k_norm, cos, sin)
        return k.transpose(1, 2), self.heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, context: KeyValue, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        q = normed_rotated(self.heads(self.q_proj(x)), self.q_norm, cos, sin)
        own = self.keys_values(x, cos, sin)
        dtype = own[1].dtype  # under autocast a float32 x gives float32 q and k; v has the products' own
        q = q.to(dtype)
        k, v, own_k, own_v = (each.to(dtype) for each in (*context, *own))
        if isinstance(mask, Spans):
            k, v, own_k, own_v = (each.transpose(1, 2) for each in (k, v, own_k, own_v))
            out = block_attention(q, k, v, own_k, own_v, mask, self.head_dim**-0.5)
        else:
            k, v = torch.cat((k, own_k), dim=2), torch.cat((v, own_v), dim=2)
            out = attend(q.transpose(1, 2), k, v, mask, self.head_dim**-0.5).transpose(1, 2)
        return self.o_proj(out.flatten(2))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def keys_values(self, context: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        return self.self_attn.keys_values(context, cos, sin)

    def forward(self, x: Tensor, context: KeyValue, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(_rotary_config(config))  # buffers only, none in the checkpoint
        for name, parameter in self.named_parameters():
            if name.endswith("_proj.weight") or name == "fc.weight":
                nn.init.normal_(parameter, std=config.initializer_range)

    def _layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def rope(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [R, T, E] at `positions` [R, T], float32 at least: bfloat16 is too coarse."""
        wide = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
        return self.rotary_emb(wide, positions)

    def context_keys_values(self, states: Tensor, positions: Tensor) -> list[KeyValue]:
        """Each layer's keys and values of the context.

        Args:
            states: [R, C, K * H] the taps' outputs, side by side in the order of the taps.
            positions: [R, C] each token's position in its document.
        """
        context = self.hidden_norm(self.fc(states))
        cos, sin = self.rope(positions, context)
        return [layer.keys_values(context, cos, sin) for layer in self._layers()]

    def forward(
        self, x: Tensor, positions: Tensor, context: Sequence[KeyValue], masks: Sequence[Any]
    ) -> Tensor:
        """The normed hidden states [R, Q, H] to which the target's head is applied.

        Args:
            x: [R, Q, H] the target's embedding of the blocks' tokens (anchor, mask, mask, ...).
            positions: [R, Q] anchor's position + slot.
            context: from `context_keys_values`.
            masks: one a layer, dense, a BlockMask or Spans; the key axis is the context, then the blocks.
        """
        cos, sin = self.rope(positions, x)
        for layer, layer_context, mask in zip(self._layers(), context, masks, strict=True):
            x = layer(x, layer_context, cos, sin, mask)
        return self.norm(x)


def _rotary_config(config: DrafterConfig) -> Qwen3Config:
    """Just what transformers' RoPE reads."""
    return Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
    )
