"""One training step in three forms: uncompiled, compiled, captured. Do they agree, and what do they cost?

A step is forward, loss, backward, clipping and fused AdamW on a small transformer block, fixed shapes, data
that change. Each fast form starts from a copy of the same weights as the plain one, and must end at the same
losses and weights.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .common import Figures, run

BATCH, TOKENS, WIDTH, HEADS = 4, 128, 128, 4
STEPS, WARM_UP = 8, 3
CLOSE: dict[str, Any] = {"rtol": 1e-2, "atol": 2e-4}
EPS = 1e-3
"""Of AdamW: gradients that are zero but for rounding (a key's bias) must not become steps of full size."""


class Block(nn.Module):
    """x [batch, tokens, width] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.silu(self.up(self.between(x))))


class Trainee:
    """A model with its optimizer; `forward` may be a compiled one over the same parameters."""

    def __init__(self, model: nn.Module, device: str, compile: Callable[..., Any] | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.forward = compile(self.model, dynamic=False) if compile else self.model
        more: dict[str, Any] = {"capturable": True} if device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=EPS, fused=True, **more)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss, a scalar on the device."""
        loss = F.mse_loss(self.forward(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.detach()


def data(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """STEPS pairs of [batch, tokens, width]."""
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, TOKENS, WIDTH)
    return [
        (
            torch.randn(shape, generator=generator).to(device),
            torch.randn(shape, generator=generator).to(device),
        )
        for _ in range(STEPS)
    ]


def timed(
    device: str, step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[list[float], float]:
    """(losses, median milliseconds of the steps after the warm-up)."""
    losses, taken = [], []
    for x, y in data(device):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        losses.append(float(step(x, y)))
        taken.append((time.perf_counter() - began) * 1000)
    return losses, statistics.median(taken[WARM_UP:])


def captured(trainee: Trainee, device: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The whole step in one graph. Its warm-up is undone, so that it starts where the others do."""
    x, y = (torch.zeros(BATCH, TOKENS, WIDTH, device=device) for _ in range(2))
    weights = copy.deepcopy(trainee.model.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            trainee.step(x, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loss = trainee.step(x, y)
    trainee.model.load_state_dict(weights)
    for state in trainee.optimizer.state.values():
        for value in state.values():
            value.zero_()
    for parameter in trainee.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()

    def replay(new_x: torch.Tensor, new_y: torch.Tensor) -> torch.Tensor:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        return loss

    return replay


def compare(device: str, form: str, compile: Callable[..., Any] = torch.compile) -> Figures:
    """`form`: compiled | captured. Raises AssertionError where it does not do what the plain step does."""
    torch.manual_seed(0)
    model = Block().to(device)
    plain = Trainee(model, device)
    fast = Trainee(model, device, compile if form == "compiled" else None)
    wanted, plain_ms = timed(device, plain.step)
    losses, fast_ms = timed(device, fast.step if form == "compiled" else captured(fast, device))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), **CLOSE)
    for mine, theirs in zip(fast.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    figures: Figures = {"eager ms": round(plain_ms, 2), f"{form} ms": round(fast_ms, 2)}
    if device == "cuda":
        figures["peak MiB"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return figures


if __name__ == "__main__":
    where = "cuda" if torch.cuda.is_available() else "cpu"
    run({form: lambda form=form: compare(where, form) for form in ("compiled", "captured")})  # type: ignore[misc]
