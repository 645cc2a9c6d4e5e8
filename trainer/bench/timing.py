"""Times of work on a CPU or a GPU, and of matrix products alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.bench.flops import Product

CUBE = 8192  # rows, columns and depth of the product that tells a GPU's rate


def clocked(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def timed(work: Callable[[], object], device: torch.device, repeats: int, warmup: int = 1) -> float:
    """Median seconds of one call; of at least `repeats`."""
    for _ in range(warmup):
        work()
    return statistics.median(clocked(work, device) for _ in range(repeats))


def product_s(product: Product, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a product and its gradients, all its times one after another, with operands laid out as in a
    step.
    """
    with device:
        x = torch.randn(product.m, product.k, dtype=dtype)
        weight = torch.randn(product.n, product.k, dtype=dtype)
        y = torch.randn(product.m, product.n, dtype=dtype)
    runs: list[Callable[[], object]] = [partial(torch.mm, x, weight.T)]
    if "input" in product.backward:
        runs.append(partial(torch.mm, y, weight))
    if "weight" in product.backward:
        runs.append(partial(torch.mm, y.T, x))

    def run(times: int) -> None:
        for _ in range(times):
            for each in runs:
                each()

    run(1)  # untimed: the library looks for its way
    return clocked(partial(run, product.times), device)


def in_turns(
    work: Callable[[], object],
    products: Sequence[Product],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> tuple[float, float]:
    """Median seconds of one call of `work`, and of its products alone.

    They take turns, and products run as long as they do in the work: a GPU lowers its clock as it gets hot,
    so products that are timed one by one after a pause are up to a twentieth faster than those in the work.
    """
    whole, alone = [], []
    for _ in range(repeats):
        whole.append(clocked(work, device))
        alone.append(sum(product_s(product, dtype, device) for product in products))
    return statistics.median(whole), statistics.median(alone)


def cubed_tflops(device: torch.device, repeats: int) -> float | None:
    """TFLOP/s of a bfloat16 product of CUBE cubed; None on a CPU."""
    if device.type != "cuda":
        return None
    cube = Product("cube", CUBE, CUBE, CUBE, 1, ())
    seconds = statistics.median(product_s(cube, torch.bfloat16, device) for _ in range(max(repeats, 10)))
    return cube.flop / seconds / 1e12


def peak_gib(device: torch.device) -> float | None:
    """The most memory that tensors took since `reset_peak`; None on a CPU, where it is not told apart."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def reset_peak(device: torch.device) -> float | None:
    """Begin to look for the peak; GiB that are taken now."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / 2**30
