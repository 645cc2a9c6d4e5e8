"""CUDA graphs and torch.compile in threads: one small question a case.

Every case trains a tiny module for a few steps with data that change, and compares outputs and gradients with
the same module uncompiled: a graph that replays the wrong memory does not pass. Forward and backward, because
the backward of CUDA runs in threads of autograd's own. `cudagraph_trees` is imported by the main thread
first.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .common import Figures, in_threads, run

ROWS, WIDTH = 32, 64
STEPS = 4
THREADS = 3
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}

TREES = {"mode": "reduce-overhead"}
LEGACY = {"options": {"triton.cudagraphs": True, "triton.cudagraph_trees": False}}
PLAIN: dict[str, Any] = {}

Compile = Callable[..., Any]


class Pair:
    """A module and its uncompiled twin. `how`: what `torch.compile` is told beside dynamic=False."""

    def __init__(self, device: str, how: dict[str, Any], compile: Compile = torch.compile) -> None:
        self.device = device
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device)
        self.twin = copy.deepcopy(made)
        self.module = made
        self.compiled = compile(made, dynamic=False, **how)

    def train(self, steps: int = STEPS) -> None:
        """Raises AssertionError where the compiled module's numbers are not its twin's."""
        for _ in range(steps):
            data = torch.randn(ROWS, WIDTH, device=self.device)
            torch.compiler.cudagraph_mark_step_begin()
            output = self.step(self.compiled, self.module, data)
            wanted = self.step(self.twin, self.twin, data)
            torch.testing.assert_close(output, wanted, **CLOSE)
            for mine, theirs in zip(self.module.parameters(), self.twin.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)

    @staticmethod
    def step(forward: Any, module: nn.Module, data: torch.Tensor) -> torch.Tensor:
        """The output [rows, width]; fresh gradients are left in the module's parameters."""
        for parameter in module.parameters():
            parameter.grad = None
        output = forward(data)
        output.square().mean().backward()
        return output.detach().clone()


def trees_module() -> Any:
    """Imported in the main thread, whose state it sets up at that moment."""
    import torch._inductor.cudagraph_trees as trees

    return trees


def local_tls() -> None:
    """What torch's module does for the thread that imports it, in Python alone."""
    local = trees_module().local
    local.tree_manager_containers = {}
    local.tree_manager_locks = defaultdict(threading.Lock)


def stashed_tls() -> None:
    """The same, and the objects in C, from where autograd's threads take them."""
    local_tls()
    local = trees_module().local
    stash = torch._C._stash_obj_in_tls
    stash("tree_manager_containers", local.tree_manager_containers)
    stash("tree_manager_locks", local.tree_manager_locks)


def main_thread(make: Callable[[dict[str, Any]], Pair], how: dict[str, Any]) -> Figures:
    make(how).train()
    return {}


def threads(
    make: Callable[[dict[str, Any]], Pair],
    how: dict[str, Any],
    *,
    count: int,
    prepare: Callable[[], None] | None = None,
) -> Figures:
    """`count` threads at once, each with a module of its own."""

    def work(pair: Pair) -> None:
        if prepare is not None:
            prepare()
        pair.train()

    in_threads([partial(work, make(how)) for _ in range(count)])
    return {"threads": count}


def warm_then_replay(make: Callable[[dict[str, Any]], Pair], how: dict[str, Any]) -> Figures:
    """Compiled and recorded in the main thread, replayed in another."""
    pair = make(how)
    pair.train()
    in_threads([pair.train])
    return {}


def own_capture(make: Callable[[dict[str, Any]], Pair], how: dict[str, Any]) -> Figures:
    """Forward and backward in one `torch.cuda.graph` of our own, no compiling; fixed buffers."""
    pair = make(how)
    data = torch.randn(ROWS, WIDTH, device=pair.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            pair.step(pair.module, pair.module, data)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    for parameter in pair.module.parameters():
        parameter.grad = None
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        output = pair.module(data)
        output.square().mean().backward()
    for _ in range(STEPS):
        data.copy_(torch.randn(ROWS, WIDTH, device=pair.device))
        graph.replay()
        wanted = pair.step(pair.twin, pair.twin, data)
        torch.testing.assert_close(output, wanted, **CLOSE)
        for mine, theirs in zip(pair.module.parameters(), pair.twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)
    return {}


def cases(device: str, compile: Compile = torch.compile) -> dict[str, Callable[[], Figures]]:
    """By name, in the order of dflashctl's table."""

    def make(how: dict[str, Any]) -> Pair:
        trees_module()
        return Pair(device, how, compile)

    return {
        "main-thread": partial(main_thread, make, TREES),
        "one-thread": partial(threads, make, TREES, count=1),
        "threads-at-once": partial(threads, make, TREES, count=THREADS),
        "warm-main-replay-thread": partial(warm_then_replay, make, TREES),
        "local-tls": partial(threads, make, TREES, count=1, prepare=local_tls),
        "stashed-tls": partial(threads, make, TREES, count=1, prepare=stashed_tls),
        "trees-off": partial(threads, make, LEGACY, count=1),
        "trees-off-threads-at-once": partial(threads, make, LEGACY, count=THREADS),
        "inductor": partial(main_thread, make, PLAIN),
        "inductor-threads-at-once": partial(threads, make, PLAIN, count=THREADS),
        "own-capture": partial(own_capture, make, PLAIN),
    }


if __name__ == "__main__":
    run(cases("cuda" if torch.cuda.is_available() else "cpu"))
