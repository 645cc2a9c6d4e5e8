"""Run on a machine with a GPU: pytest -m gpu tests/gpu/test_block_attention.py. The attention kernels at the
sizes of real drafters, beside float64 arithmetic, gradients included; and the same to the bit each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.model.attention_spans import spans_of
from trainer.model.block_attention import block_attention
from trainer.model.mask import Bounds, bounds, dense_mask

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
NAMES = ("q", "k", "v", "own_k", "own_v")


def rule_of(tokens: int, count: int, block: int, window: int | None) -> Bounds:
    """Two rows: one document, and several with dead blocks behind."""
    generator = torch.Generator().manual_seed(tokens + count)
    anchors = torch.stack([torch.randperm(tokens, generator=generator)[:count].sort().values for _ in "ab"])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    keep[1, -count // 3 :] = False
    starts = torch.zeros(2, tokens, dtype=torch.int64)
    for start in torch.randperm(tokens, generator=generator)[:5].sort().values.tolist():
        starts[1, start:] = start
    given = (torch.where(keep, anchors, 0), keep, starts)
    return bounds(*(each.cuda() for each in given), block, window)


def exact(parts: list[Tensor], mask: Tensor, scale: float) -> Tensor:
    q, k, v, own_k, own_v = parts
    share = q.shape[2] // k.shape[2]
    keys, values = (torch.cat(pair, 1).repeat_interleave(share, 2) for pair in ((k, own_k), (v, own_v)))
    scores = scale * torch.einsum("rqae,rkae->raqk", q, keys)
    alive = mask.any(-1, keepdim=True)
    p = torch.where(mask, scores, -torch.inf).where(alive, 0.0).softmax(-1) * alive
    return torch.einsum("raqk,rkae->rqae", p, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "count", "block", "window", "heads", "groups", "size"),
    [
        (1000, 50, 16, None, 8, 2, 128),
        (1000, 50, 16, 300, 8, 2, 128),
        (513, 33, 7, 64, 6, 2, 64),
        (300, 20, 16, None, 5, 1, 32),
        (256, 3, 10, 8, 16, 1, 128),
        (900, 400, 8, None, 2, 2, 16),
    ],
)
def test_output_and_gradients(
    gpus: int,
    dtype: torch.dtype,
    tokens: int,
    count: int,
    block: int,
    window: int | None,
    heads: int,
    groups: int,
    size: int,
) -> None:
    rule = rule_of(tokens, count, block, window)
    queries = count * block
    shapes = [(queries, heads), (tokens, groups), (tokens, groups), (queries, groups), (queries, groups)]
    generator = torch.Generator("cuda").manual_seed(1)
    drawn = [torch.randn(2, *shape, size, device="cuda", generator=generator).to(dtype) for shape in shapes]
    upstream = torch.randn(drawn[0].shape, device="cuda", generator=generator).to(dtype)

    def run() -> tuple[Tensor, list[Tensor]]:
        q, k, v, own_k, own_v = mine = [each.clone().requires_grad_() for each in drawn]
        out = block_attention(q, k, v, own_k, own_v, spans_of(rule, heads // groups), size**-0.5)
        out.backward(upstream)
        return out.detach(), [each.grad for each in mine if each.grad is not None]

    out, gradients = run()
    theirs = [each.double().requires_grad_() for each in drawn]
    wanted = exact(theirs, dense_mask(rule), size**-0.5)
    wanted.backward(upstream.double())
    alive = rule.alive[:, :, None, None]
    assert bool((out.masked_fill(alive, 0) == 0).all())
    noise = 1e-2 if dtype == torch.bfloat16 else 2e-3
    assert (out.double() - wanted.detach()).norm() < noise * wanted.detach().norm()
    for name, found, other in zip(NAMES, gradients, theirs, strict=True):
        assert other.grad is not None
        assert (found.double() - other.grad).norm() < noise * other.grad.norm(), name
    again, others = run()
    assert torch.equal(out, again)
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))
