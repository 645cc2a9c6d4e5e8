"""The matrix products of a step, one by one, and how many operations they and attention are.

One list is both counted and run alone (products.py), so the count and the time are of the same work. A
multiplication and an addition are two operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.bench.shapes import Shape
from trainer.model.mask import Bounds, own_keys
from trainer.training.loss import cut

FORMULA = (
    "2*M*K*N for each product M x K by K x N: fc forward and weight gradient; every projection of the "
    "context (k, v) and of the blocks (q, k, v, o, gate, up, down) forward, input and weight gradient; the "
    "frozen head forward and input gradient, for slots 1 to B-1 alone. Attention: 12 * heads * head size for "
    "each (query, key) pair that the layer's mask allows (2 products forward, 4 backward). Nothing for "
    "norms, RoPE, softmax or the optimizer."
)


@dataclass(frozen=True)
class Product:
    """X[m, k] times W[n, k] transposed, and its gradients, done `times` a step."""

    name: str
    m: int
    k: int
    n: int
    times: int
    backward: tuple[str, ...]  # of "input", "weight"

    @property
    def flop(self) -> int:
        return 2 * self.m * self.k * self.n * self.times * (1 + len(self.backward))


@dataclass(frozen=True)
class Work:
    """How a step's batch is cut."""

    rows: int  # of one micro-batch
    micro_batches: int
    row_tokens: int
    pass_width: int  # anchors a row
    passes: int  # of each micro-batch, all replays together
    loss_chunk: int | None = None  # tokens of the head at once; None: all


BOTH = ("input", "weight")


def head_products(shape: Shape, tokens: int, times: int, chunk: int | None) -> list[Product]:
    """As trainer/training/loss.py cuts them when all tokens count: equal chunks, so a few are done twice."""
    size, chunks = cut(tokens, chunk or tokens)
    return [Product("head", size, shape.hidden, shape.vocabulary, chunks * times, ("input",))]


def products(shape: Shape, work: Work) -> list[Product]:
    """All matrix products of one step's forward and backward."""
    context, blocks = work.rows * work.row_tokens, work.rows * work.pass_width * shape.block
    passes, each = work.passes * work.micro_batches, work.micro_batches * shape.layers
    hidden, query = shape.hidden, shape.heads * shape.head_size
    narrow = shape.key_value_heads * shape.head_size
    layered = passes * shape.layers
    tokens = work.rows * work.pass_width * (shape.block - 1)
    return [
        Product("fc", context, shape.taps * hidden, hidden, work.micro_batches, ("weight",)),
        Product("context k, v", context, hidden, narrow, 2 * each, BOTH),
        Product("q", blocks, hidden, query, layered, BOTH),
        Product("k, v", blocks, hidden, narrow, 2 * layered, BOTH),
        Product("o", blocks, query, hidden, layered, BOTH),
        Product("gate, up", blocks, hidden, shape.ffn, 2 * layered, BOTH),
        Product("down", blocks, shape.ffn, hidden, layered, BOTH),
        *head_products(shape, tokens, passes, work.loss_chunk),
    ]


def pairs(rule: Bounds) -> int:
    """How many (query, key) pairs a mask allows; read from the device."""
    query = torch.arange(rule.low.shape[1], device=rule.low.device)
    first, last = own_keys(rule, query)
    seen = (rule.high - rule.low).clamp(min=0) + (last - first)
    return int((seen * rule.alive).sum())


def attention_flop(shape: Shape, pairs_by_layer: Sequence[int]) -> int:
    """Forward and backward of all layers. A kernel that computes scores twice does more; that is its loss."""
    return 12 * shape.heads * shape.head_size * sum(pairs_by_layer)
