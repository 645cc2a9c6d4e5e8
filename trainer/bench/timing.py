"""Times of work on a CPU or a GPU, and of matrix products alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.bench.flops import Product

CUBE = 8192  # rows, columns and depth of the product that tells a GPU's rate


def timed(work: Callable[[], object], device: torch.device, repeats: int, warmup: int = 1) -> float:
    """Median seconds of one call; of at least `repeats`."""
    for _ in range(warmup):
        work()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def product_s(product: Product, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Seconds of a product and its gradients, all its times together, with operands laid out as in a step."""
    with device:
        x = torch.randn(product.m, product.k, dtype=dtype)
        weight = torch.randn(product.n, product.k, dtype=dtype)
        y = torch.randn(product.m, product.n, dtype=dtype)
    runs: list[Callable[[], object]] = [partial(torch.mm, x, weight.T)]
    if "input" in product.backward:
        runs.append(partial(torch.mm, y, weight))
    if "weight" in product.backward:
        runs.append(partial(torch.mm, y.T, x))
    return product.times * sum(timed(run, device, repeats) for run in runs)


def products_s(made: Sequence[Product], dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    return sum(product_s(product, dtype, device, repeats) for product in made)


def cubed_tflops(device: torch.device, repeats: int) -> float | None:
    """TFLOP/s of a bfloat16 product of CUBE cubed; None on a CPU."""
    if device.type != "cuda":
        return None
    cube = Product("cube", CUBE, CUBE, CUBE, 1, ())
    return cube.flop / product_s(cube, torch.bfloat16, device, max(repeats, 10)) / 1e12


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
