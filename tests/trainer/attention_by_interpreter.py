"""The attention's Triton kernels by Triton's interpreter, which needs no GPU, beside float64 arithmetic.

For each case the largest errors of the output and of each gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model import attention_spans as spans
from trainer.model.attention_spans import Tiles
from trainer.model.block_attention import block_attention
from trainer.model.mask import bounds, dense_mask

SIZE = 16


@dataclass(frozen=True)
class Case:
    name: str
    anchors: list[list[int]]  # of each row; negative: dead
    starts: list[list[int]]  # of the documents of each row
    tokens: int = 40
    block: int = 4
    window: int | None = None
    heads: int = 4
    groups: int = 2
    tiles: tuple[Tiles, Tiles, Tiles] = (Tiles(16, 16, 16, 4, 1),) * 3
    dtype: torch.dtype = torch.float32


FEW = [[3, 9, 10, 31], [1, 2, 38, -1]]
ONE = [[0], [0]]
WIDE = (Tiles(32, 16, 16, 4, 1), Tiles(16, 32, 16, 4, 1), Tiles(32, 16, 16, 4, 1))
CASES = [
    Case("full", FEW, ONE),
    Case("documents", FEW, [[0, 8, 30], [0, 1, 17]]),
    Case("sliding", FEW, [[0, 8, 30], [0]], window=6),
    Case("window shorter than a block", FEW, ONE, window=2),
    Case("a dead block between, a row of dead ones", [[3, -1, 20], [-1, -1, -1]], ONE),
    Case("three heads share", FEW, ONE, heads=3, groups=1),
    Case("six heads share: several packs", FEW, [[0, 8, 30], [0]], heads=6, groups=1),
    Case("none shares", FEW, ONE, heads=2, groups=2),
    Case("blocks that are no power of 2", FEW, [[0, 8], [0]], block=5, window=9),
    Case("a block wider than a tile", [[7, 30], [4, 5]], ONE, block=20, heads=4, groups=1),
    Case("one slot", [[9], [1]], ONE, block=1),
    Case("a context of many tiles", [[80, 95, 99], [1, 50, 97]], ONE, tokens=100),
    Case("a context of whole tiles", [[40, 60, 63], [62, 63, -1]], [[0], [33]], tokens=64, window=40),
    Case("other tiles", [[3, 9, 10, 31, 39] * 3, [1, 2, 38, 39, -1] * 3], ONE, tiles=WIDE),
    Case("float16", FEW, [[0, 8, 30], [0]], dtype=torch.float16),
]


def reference(parts: list[Tensor], mask: Tensor, scale: float) -> Tensor:
    q, k, v, own_k, own_v = parts
    share = q.shape[2] // k.shape[2]
    keys = torch.cat((k, own_k), 1).repeat_interleave(share, 2)
    values = torch.cat((v, own_v), 1).repeat_interleave(share, 2)
    scores = scale * torch.einsum("rqae,rkae->raqk", q, keys)
    alive = mask.any(-1, keepdim=True)
    p = torch.where(mask, scores, -torch.inf).where(alive, 0.0).softmax(-1) * alive
    return torch.einsum("raqk,rkae->rqae", p, values)


def compared(case: Case) -> dict[str, object]:
    spans.FORWARD, spans.QUERIES, spans.KEYS = case.tiles
    given = torch.tensor(case.anchors)
    begins = torch.zeros(len(case.starts), case.tokens, dtype=torch.int64)
    for row, starts in enumerate(case.starts):
        for start in starts:
            begins[row, start:] = start
    rule = bounds(given.clamp(min=0), given >= 0, begins, case.block, case.window)
    generator = torch.Generator().manual_seed(0)
    rows, queries = rule.low.shape
    sizes = [(queries, case.heads), *[(case.tokens, case.groups)] * 2, *[(queries, case.groups)] * 2]
    drawn = [torch.randn(rows, *each, SIZE, generator=generator).to(case.dtype) for each in sizes]
    given_back = torch.randn(drawn[0].shape, generator=generator).to(case.dtype)
    mine = [each.clone().requires_grad_() for each in drawn]
    q, k, v, own_k, own_v = mine
    rule_by_tiles = spans.spans_of(rule, case.heads // case.groups)
    out = block_attention(q, k, v, own_k, own_v, rule_by_tiles, SIZE**-0.5)
    out.backward(given_back)
    exact = [each.double().requires_grad_() for each in drawn]
    wanted = reference(exact, dense_mask(rule), SIZE**-0.5)
    wanted.backward(given_back.double())
    names = ("q", "k", "v", "own_k", "own_v")
    errors = {"out": float((out.detach().double() - wanted.detach()).abs().max())}
    for name, ours, theirs in zip(names, mine, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        errors[name] = float((ours.grad.double() - theirs.grad).abs().max())
    return {"name": case.name, "dtype": str(case.dtype), "errors": errors}


def run() -> list[dict[str, object]]:
    return [compared(case) for case in CASES]
