"""Functions that a GPU runs compiled, once per process and shape, and a CPU runs as they are.

For parts that are slow or large when every operation writes its result to memory: attention under a block
mask, its tile map, the softmax over a vocabulary. Shapes are fixed (`dynamic=False`), so no later batch
compiles again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from trainer.model.gpu_kernels import run_here

F = TypeVar("F", bound=Callable[..., object])


@cache
def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=False)


def where_it_pays(function: F, example: Tensor) -> F:
    """The function, compiled if `example` is on a GPU that kernels can be built for; inside a larger compiled
    region, as it is.
    """
    if not example.is_cuda or torch.compiler.is_compiling() or not run_here():
        return function
    return _compiled(function)  # type: ignore[return-value]
