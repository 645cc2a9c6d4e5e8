"""Run on a machine with a GPU: pytest -m gpu tests/gpu/test_kernels.py. Norm with RoPE and AdamW's update by
our kernels, at the sizes of real drafters, beside float64 arithmetic and torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.model.drafter import RMSNorm, normed_rotated, rotate
from trainer.training.adamw import AdamW
from trainer.training.twins import Twins, twin_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("heads", "size"), [(32, 128), (8, 128), (5, 64), (1, 256)])
def test_norm_and_rope(gpus: int, heads: int, size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"device": "cuda", "generator": generator}
    x, upstream = (torch.randn(2, 1001, heads, size, **make).bfloat16() for _ in "ab")  # type: ignore[arg-type]
    norm = RMSNorm(size, 1e-6).cuda()
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.randn(size, **make))  # type: ignore[arg-type]
    angle = 1000 * torch.rand(2, 1001, size, **make)  # type: ignore[arg-type]
    cos, sin = angle.cos(), angle.sin()

    def run() -> tuple[torch.Tensor, ...]:
        mine, norm.weight.grad = x.clone().requires_grad_(), None
        out = normed_rotated(mine, norm, cos, sin)
        out.backward(upstream)
        assert mine.grad is not None and norm.weight.grad is not None
        return out.detach(), mine.grad, norm.weight.grad

    found = run()
    exact, other = x.double().requires_grad_(), RMSNorm(size, 1e-6).cuda().double()
    other.load_state_dict(norm.state_dict())
    wanted = rotate(other(exact), cos.double(), sin.double())
    wanted.backward(upstream.double())
    for mine, theirs in zip(found, (wanted.detach(), exact.grad, other.weight.grad), strict=True):
        assert theirs is not None and (mine.double() - theirs).norm() < 5e-3 * theirs.norm()
    assert all(torch.equal(one, two) for one, two in zip(found, run(), strict=True))


def test_adamw_is_torchs_own_and_keeps_the_twins(gpus: int) -> None:
    torch.manual_seed(0)
    mine, theirs = (nn.Sequential(nn.Linear(4000, 4001), nn.LayerNorm(4001)).cuda() for _ in "ab")
    theirs.load_state_dict(mine.state_dict())
    Twins(mine, torch.bfloat16)
    rate, factors = (
        torch.tensor(3e-3, device="cuda"),
        {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True},
    )
    ours = AdamW(mine.parameters(), lr=rate, capturable=True, **factors)  # type: ignore[arg-type]
    other = torch.optim.AdamW(theirs.parameters(), lr=3e-3, **factors)  # type: ignore[arg-type]
    before = [each.detach().clone() for each in mine.parameters()]
    for _ in range(4):
        for one, two in zip(mine.parameters(), theirs.parameters(), strict=True):
            two.grad = torch.randn_like(two)
            one.grad = 16 * two.grad
        ours.grad_scale, ours.found_inf = torch.tensor(16.0, device="cuda"), torch.tensor(0.0, device="cuda")
        ours.step()
        other.step()
        for one in mine[0].parameters():
            twin = twin_of(one)
            assert twin is not None and torch.equal(twin, one.bfloat16())
            assert twin.version == one._version  # type: ignore[attr-defined]
    for one, two, old in zip(mine.parameters(), theirs.parameters(), before, strict=True):
        assert (one - two).norm() < 1e-5 * (two - old).norm()
