"""Do the GPUs reach each other's memory, and are copies between them right and fast?"""

from __future__ import annotations

import itertools
import time

import torch

from .common import Figures, run

COPY_BYTES = 256 * 2**20
ROUNDS = 5


def pairs() -> list[tuple[int, int]]:
    return list(itertools.permutations(range(torch.cuda.device_count()), 2))


def peer_access() -> Figures:
    """Raises AssertionError naming the pairs without it."""
    without = [f"{a}->{b}" for a, b in pairs() if not torch.cuda.can_device_access_peer(a, b)]
    assert not without, f"no peer access: {' '.join(without)}"
    return {"pairs": len(pairs())}


def copies() -> Figures:
    """GB/s of the slowest and fastest pair. Raises AssertionError where a copy is not what was sent."""
    rates: dict[str, float] = {}
    for a, b in pairs():
        sent = torch.randint(0, 2**31 - 1, (COPY_BYTES // 4,), dtype=torch.int32, device=f"cuda:{a}")
        arrived = torch.empty_like(sent, device=f"cuda:{b}")
        arrived.copy_(sent)
        for device in (a, b):
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            arrived.copy_(sent)
        for device in (a, b):
            torch.cuda.synchronize(device)
        rates[f"{a}->{b}"] = ROUNDS * COPY_BYTES / (time.perf_counter() - began) / 1e9
        assert torch.equal(arrived.cpu(), sent.cpu()), f"{a}->{b}: what arrived is not what was sent"
        del sent, arrived
    slow, fast = min(rates, key=lambda pair: rates[pair]), max(rates, key=lambda pair: rates[pair])
    return {
        "pairs": len(rates),
        f"slowest GB/s ({slow})": round(rates[slow], 1),
        f"fastest GB/s ({fast})": round(rates[fast], 1),
    }


if __name__ == "__main__":
    run({"peer-access": peer_access, "copies": copies})
