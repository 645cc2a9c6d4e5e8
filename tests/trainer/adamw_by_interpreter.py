"""AdamW's kernel by Triton's interpreter, which needs no GPU, beside torch's own update in float64."""

from __future__ import annotations

import torch
from torch import nn

from trainer.model.accumulate import add_by_kernel
from trainer.training import adamw
from trainer.training.twins import Twins, twin_of

adamw.BLOCK = 64
STEPS, BAD = 5, 2


def run() -> dict[str, object]:
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(17, 9), nn.LayerNorm(9))
    theirs = nn.Sequential(nn.Linear(17, 9), nn.LayerNorm(9)).double()
    theirs.load_state_dict(mine.state_dict())
    twins = Twins(mine, torch.bfloat16)
    rate = torch.tensor(0.02)
    ours = adamw.AdamW(mine.parameters(), lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    other = torch.optim.AdamW(theirs.parameters(), lr=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    stale, errors = 0, []
    for number in range(STEPS):
        lr = 0.02 / (1 + number)
        rate.fill_(lr)
        other.param_groups[0]["lr"] = lr
        bad = number == BAD
        for one, two in zip(mine.parameters(), theirs.parameters(), strict=True):
            gradient = torch.randn(one.shape)
            one.grad, two.grad = (
                8 * gradient if not bad else torch.full_like(one, torch.nan),
                gradient.double(),
            )
        before = [each.detach().clone() for each in mine.parameters()]
        ours.grad_scale, ours.found_inf = torch.tensor(8.0), torch.tensor(float(bad))
        ours.by_kernel(list(mine.parameters()))
        if bad:
            assert all(torch.equal(a, b) for a, b in zip(before, mine.parameters(), strict=True))
        else:
            other.step()
        for one, two in zip(mine.parameters(), theirs.parameters(), strict=True):
            errors.append(float((one.double() - two).abs().max()))
            for name in ("exp_avg", "exp_avg_sq"):
                errors.append(float((ours.state[one][name].double() - other.state[two][name]).abs().max()))
        linear = mine[0]
        for master in linear.parameters():
            twin = twin_of(master)
            # The interpreter cuts off where the GPU rounds.
            assert twin is not None
            assert bool(((twin.float() - master).abs() <= 2**-7 * master.abs()).all())
            stale += twin.version != master._version  # type: ignore[attr-defined]
    with torch.no_grad():
        mine[0].weight.mul_(2)  # by somebody else: found out, and cast again
    master = mine[0].weight
    with twins.standing_in():
        followed = torch.equal(mine[0].weight, master.to(torch.bfloat16))
    return {
        "error": max(errors),
        "stale": stale,
        "followed": followed,
        "counts": counts(ours),
        "sums": sums(),
    }


def counts(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(state["step"]) for state in optimizer.state.values()]


def sums() -> float:
    """How far a sum of three float16 parts is from torch's own; they lie transposed in memory."""
    parts = [torch.randn(2, 5, 3, 7).half().transpose(1, 2) for _ in range(3)]
    total = torch.empty_like(parts[0], dtype=torch.float32)
    for number, part in enumerate(parts):
        version = total._version
        add_by_kernel(total, part, first=number == 0)
        assert total._version > version
    return float((total - (parts[0].float() + parts[1] + parts[2])).abs().max())
