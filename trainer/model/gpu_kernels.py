"""Whether Triton can build kernels for the GPU here: one rule for our own and for those that torch compiles.

Triton builds a small library with a C compiler when it is first used, and our kernels multiply bfloat16
numbers, as GPUs do from compute capability 8.0 on. A GPU box may lack either. A step then runs as torch's own
operations, uncompiled: slower, and attention holds a dense mask. That is said once (`warnings_of`); a step
that a recipe wants otherwise by name is refused.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import cache

import torch

from trainer.words import first_line

LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Facts:
    """Of one GPU and what is installed beside it."""

    problem: str | None = None  # that Triton has with its driver
    capability: tuple[int, int] = LEAST_CAPABILITY
    shared_bytes: int | None = None  # of one program at most; None: unknown


def why_none(facts: Facts) -> str | None:
    """What is in the way of every kernel; None: nothing."""
    if facts.problem is not None:
        return f"Triton cannot build kernels: {facts.problem}"
    if facts.capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, each)) for each in (facts.capability, LEAST_CAPABILITY))
        return f"this GPU has compute capability {have}, kernels need {least}"
    return None


@cache
def facts_here() -> Facts:
    """Of this thread's GPU when first asked; a box has one kind. Builds Triton's library, too."""
    if not torch.cuda.is_available():
        return Facts(problem="torch sees no CUDA GPU")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Facts(
        driver_problem(),
        (properties.major, properties.minor),
        getattr(properties, "shared_memory_per_block_optin", None),
    )


def driver_problem() -> str | None:
    """Why Triton cannot talk to the GPU's driver: it is built and loaded here, as the first kernel would."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except subprocess.CalledProcessError as error:  # what the compiler said is in the log
        return f"{error.cmd[0]} fails; it needs Python's headers (python3-dev) and libcuda"
    except Exception as error:  # of any version of Triton
        return first_line(error)
    return None


def why_none_here() -> str | None:
    """`why_none` of this process's GPU."""
    return why_none(facts_here())


@torch.compiler.assume_constant_result
def run_here() -> bool:
    """Whether kernels run on this process's GPU. Asked only for tensors that are on one."""
    return why_none_here() is None


def warnings_here() -> list[str]:
    """What a run on a GPU says of kernels that it goes without."""
    reason = why_none_here()
    if reason is None:
        return []
    return [
        f"WARNING: no GPU kernels: {reason}. Attention, loss and update run as torch's own operations, "
        "slower and with more memory. next: install gcc and python3-dev there, or use a newer GPU"
    ]
