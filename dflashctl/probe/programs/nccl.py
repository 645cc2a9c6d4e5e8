"""Collectives between processes: all-reduce by gloo on the host, by NCCL on one GPU a process."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .common import Failed, Figures, run, text_of

VALUES = 64 * 2**20  # 256 MiB of float32
SMALL = 1 << 16
ROUNDS = 5
TIMEOUT = datetime.timedelta(seconds=60)


def _rank(rank: int, world: int, backend: str, store: str, outbox: Any) -> None:
    try:
        outbox.put((rank, _all_reduce(rank, world, backend, store)))
    except BaseException as error:
        outbox.put((rank, text_of(error)))
    outbox.close()
    outbox.join_thread()
    os._exit(0)  # destroying a communicator whose peer has failed may hang


def _all_reduce(rank: int, world: int, backend: str, store: str) -> float:
    """Seconds of one all-reduce. Raises AssertionError for a wrong sum."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    more: dict[str, Any] = {}
    if backend == "nccl":
        torch.cuda.set_device(device)
        more["device_id"] = device  # the communicator is made at once, not at the first collective
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT, **more
    )
    values = torch.full((VALUES if backend == "nccl" else SMALL,), float(rank + 1), device=device)
    dist.all_reduce(values)
    wanted = world * (world + 1) / 2
    assert bool((values == wanted).all()), f"rank {rank}: a sum is {values.max().item()}, not {wanted}"
    dist.barrier()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    if backend == "nccl":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / ROUNDS


def all_reduce(backend: str, world: int) -> Figures:
    """Raises Failed with what the ranks met."""
    context = mp.get_context("spawn")
    outbox = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world, backend, f"{folder}/store", outbox))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        answers = dict(outbox.get(timeout=TIMEOUT.total_seconds() * 2) for _ in ranks)
        for process in ranks:
            process.join()
    errors = [(f"rank {rank}", RuntimeError(said)) for rank, said in answers.items() if isinstance(said, str)]
    if errors:
        raise Failed(sorted(errors, key=lambda error: error[0]), world)
    figures: Figures = {"ranks": world}
    if backend == "nccl" and world > 1:
        # "bus bandwidth" as nccl-tests count it: 2 (n - 1) / n of the bytes pass each link
        sent = 2 * (world - 1) / world * VALUES * 4
        figures["bus GB/s"] = round(sent / max(answers.values()) / 1e9, 1)
    return figures


if __name__ == "__main__":
    run(
        {
            "gloo": lambda: all_reduce("gloo", 2),
            "one-gpu": lambda: all_reduce("nccl", 1),
            "all-gpus": lambda: all_reduce("nccl", torch.cuda.device_count()),
        }
    )
