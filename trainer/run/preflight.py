"""Before the first step: is there memory for the largest step, and room for the checkpoints asked for?"""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.checkpoint import files as checkpoint
from trainer.errors import DoesNotFit, Refused
from trainer.machine import available_memory
from trainer.shortage import is_shortage, sizes
from trainer.training.optim import DrafterOptimizer, trained_bytes
from trainer.words import first_line, plural


def gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def check_disk(root: Path, keep: int, each: int) -> str:
    """Room for `keep` checkpoints, the best one, and the one that is being written; what to say of it.

    Args:
        each: bytes of one.
    Raises:
        Refused: with what is needed and what is free.
    """
    there = sum(path.stat().st_size for folder in root.glob("step-*") for path in folder.glob("*"))
    needed = (keep + 2) * each - there
    free = shutil.disk_usage(root).free
    told = f"{plural(keep, 'checkpoint')}, the best and the one being written, {gib(each)} each"
    if free < needed:
        raise Refused(
            f"{gib(needed)} of disk are needed ({told}), {gib(free)} are free",
            where=str(root),
            next="make room, or lower train.checkpoint.keep",
        )
    return f"disk: {gib(max(0, needed))} for {told}; {gib(free)} are free"


def check_host_memory(optimizer: DrafterOptimizer, on_host: bool, saves: bool = True) -> None:
    """Room for what training surely takes, before it is taken: a process that the kernel ends says nothing.

    Args:
        on_host: gradients and moments are in host memory too, not on a GPU.
        saves: False: another rank writes the checkpoints; this one has a copy of its weights for a moment.
    Raises:
        Refused: with what is needed and what is available.
    """
    weights, moments = trained_bytes(optimizer)
    needed = weights + (moments if saves else 0)  # the copy that checkpoints are written from
    if on_host:
        owners = 1 if optimizer.share is None else optimizer.share.size
        needed += weights + -(-moments // owners)  # gradients, and the moments themselves
    available = available_memory()
    if available is not None and needed > available:
        raise Refused(
            f"{gib(needed)} of memory are needed for gradients, moments and the copy that checkpoints are "
            f"written from, {gib(available)} are available",
            where="memory",
            next="use a smaller drafter, or a machine or container with more memory",
        )


@contextmanager
def worst_case(shape: str) -> Iterator[None]:
    """What runs inside is the largest step there is; that it does not fit is refused with figures.

    Args:
        shape: of the step, for the message.
    Raises:
        DoesNotFit.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise DoesNotFit(
            f"one step of {shape} does not fit: {sizes(error)}",
            where="memory",
            next="lower train.micro_rows or objective.anchors_per_pass: the step stays what it is",
        ) from error


@contextmanager
def kernels_wanted() -> Iterator[None]:
    """What runs inside is the first to need this run's kernels: one that cannot be built is refused.

    Raises:
        Refused: with the first line of what Triton or Inductor said.
    """
    try:
        yield
    except Exception as error:
        if not _of_kernels(error):
            raise
        raise Refused(
            f"a GPU kernel cannot be built or started: {first_line(error, kind=True)}",
            where="kernels",
            next="mend that there; dflashctl doctor looks at the compiler that kernels need, too",
        ) from error


def _of_kernels(error: BaseException) -> bool:
    """Whether Triton, its C compiler or Inductor failed, and not what they were asked to compile."""
    packages = ("triton.", "torch._inductor.")
    ours = any(
        kind.__module__.startswith(packages) or issubclass(kind, subprocess.CalledProcessError)
        for kind in type(error).__mro__
    )
    cause = error.__cause__
    return ours or "find C compiler" in str(error) or (cause is not None and _of_kernels(cause))


def peak(device: torch.device) -> str:
    """What the worst case took, in words."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"memory: a step takes at most {gib(torch.cuda.max_memory_allocated(device))} of {gib(total)}"
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"memory: the process took at most {gib(1024 * kib)} with a whole step"


def checkpoint_bytes(optimizer: DrafterOptimizer) -> int:
    """Size of one checkpoint; the JSON files and headers are less than 1 % of any real one."""
    weights, moments = trained_bytes(optimizer)
    small = sum(tensor.numel() for tensor in checkpoint.generators().values())
    return weights + moments + small + 1_000 * len(optimizer.assigned)
