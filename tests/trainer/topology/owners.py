"""A few steps of an optimizer by one process that has all gradients, or by ranks that own a share each."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import nn

from trainer.checkpoint import optimizer_state
from trainer.sections import Optimizer, ParameterGroup
from trainer.topology.colocated import Reduction
from trainer.topology.ranks import Ranks
from trainer.training.loss import Sums
from trainer.training.optim import DrafterOptimizer, Share

GROUPS = [ParameterGroup("w", ["*weight"], lr_scale=0.5, weight_decay=0.1), ParameterGroup("b", ["*bias"])]
SPOILT = 2


def module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def gradients(number: int, rank: int, of: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    made = [torch.randn(parameter.shape, generator=generator) for parameter in of.parameters()]
    if number == SPOILT and rank == 0:
        made[0][0, 0] = torch.nan
    return made


def sums(device: str) -> Sums:
    one = torch.ones((), device=device)
    return Sums(one, one, one[None], one[None], one, one)


def trained(
    clip: float, ranks: Ranks | None, size: int, steps: range, state: Any = None, device: str = "cpu"
) -> Any:
    """(norms, weights, whole moments, elements of moments held) after some steps, by one process with all
    gradients or by its ranks.
    """
    net, share = module().to(device), None if ranks is None else Share(ranks.rank, size)
    optimizer = DrafterOptimizer(net, Optimizer(lr=0.05, clip=clip, groups=GROUPS), share)
    reduction = None if ranks is None else Reduction(list(net.parameters()), ranks, optimizer)
    if state is not None:
        optimizer_state.load(optimizer, *state)
    norms = []
    for number in steps:
        mine = range(size) if ranks is None else [ranks.rank]
        made = [gradients(number, rank, net) for rank in mine]
        for parameter, *parts in zip(net.parameters(), *made, strict=True):
            parameter.grad = torch.stack(parts).sum(0).to(device)
        if reduction is not None:
            reduction(sums(device), None, number)
        norms.append(optimizer.step(0.9**number, torch.tensor(2.0, device=device)))
        if reduction is not None:
            reduction.updated()
    weights = {name: each.detach().clone() for name, each in optimizer_state.masters(optimizer).items()}
    moments = {name: each.clone() for name, each in optimizer_state.whole_moments(optimizer)}
    held = sum(each.numel() for each in optimizer_state.moments(optimizer).values() if each.ndim)
    return torch.stack(norms), weights, moments, held


def owner(rank: int, size: int, port: int, folder: str, device: str) -> None:
    """A rank: half the steps, then the other half from what was put together of them."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    ranks = Ranks(lambda: None)
    ranks.join(rank if device == "cuda" else None, 60.0)
    found = {}
    for clip in (0.0, 0.5):
        _, weights, moments, _ = trained(clip, ranks, size, range(4), None, device)
        again = trained(clip, ranks, size, range(4, 8), (weights, moments), device)
        found[clip] = (*again, moments)
    torch.save(found, f"{folder}/{rank}")
    ranks.leave()


def hold_owners_to_one_that_owns_all(size: int, folder: Path, device: str) -> None:
    """With clipping, a bad step, groups; their state is put together, and cut anew."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how = "spawn"
    if device == "cpu":  # from one process that has imported torch once for all of them
        from killed_runs import CONTEXT

        how = CONTEXT.get_start_method()
    processes.start_processes(owner, (size, port, str(folder), device), nprocs=size, start_method=how)
    for clip in (0.0, 0.5):
        _, weights, half, _ = trained(clip, None, size, range(4))
        norms, weights, moments, held = trained(clip, None, size, range(4, 8), (weights, half))
        for rank in range(size):
            mine = torch.load(folder / str(rank), map_location="cpu")[clip]
            torch.testing.assert_close(mine[0], norms)
            for found, wanted in ((mine[1], weights), (mine[2], moments), (mine[4], half)):
                assert set(found) == set(wanted)
                for name, value in found.items():
                    torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
            assert all(float(each) == 7 for name, each in mine[2].items() if name.startswith("step"))
            assert mine[3] <= 2 * Share(0, size).length(held // 2)  # moments are where they are owned
