"""Run with: pytest tests/unit/test_stop_trees.py. Random process trees are ended, whatever they do.

Each process of a tree writes its own identity down: the tests' truth is not that of the code under test.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dflashctl.agent.processes import proc, signals

NODE = r"""
import ctypes, os, random, signal, sys, time

def born(path, seed, depth):
    rng = random.Random(seed)
    if rng.random() < 0.5 and depth:
        os.setsid()
    if rng.random() < 0.5:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rng.random() < 0.3:
        ctypes.CDLL(None).prctl(15, b"VLLM::Worker", 0, 0, 0)
    children = rng.randrange(1, 4) if depth < 3 else 0
    for number in range(children):
        child_seed = rng.random()
        twice = rng.random() < 0.4
        pid = os.fork()
        if pid == 0:
            if twice and os.fork() > 0:
                os._exit(0)
            born(path, child_seed, depth + 1)
        elif twice:
            os.waitpid(pid, 0)
    start = open("/proc/self/stat").read().rpartition(")")[2].split()[19]
    with open(path, "a") as file:
        file.write("%d %s\n" % (os.getpid(), start))
    if rng.random() < 0.3 and depth:
        if rng.random() < 0.5:
            os._exit(1)                                  # an early death in the middle of the tree
        os.execve("/bin/sleep", ["python3", "600"], {})  # neither name nor environment of ours
    while True:
        time.sleep(0.5)

born(sys.argv[1], float(sys.argv[2]), 0)
"""


def recorded(box: Any) -> set[proc.Identity]:
    file = box.root / "tree"
    lines = file.read_text().splitlines() if file.exists() else []
    return {(int(pid), int(start)) for pid, start in (line.split() for line in lines)}


def births(seed: float, depth: int = 0) -> int:
    """How many NODE makes of a seed: the same draws from the same generator."""
    rng = random.Random(seed)
    for _ in ("session", "deaf", "renamed"):
        rng.random()
    children = rng.randrange(1, 4) if depth < 3 else 0
    below = 0
    for _ in range(children):
        child_seed = rng.random()
        rng.random()  # forked twice?
        below += births(child_seed, depth + 1)
    return 1 + below


def run_tree(box: Any, until: Callable[..., Any], seed: float, orphaned: bool) -> int:
    words = [sys.executable, "-c", "import time; time.sleep(600)", str(box.root / "tree"), str(seed)]
    stranger = subprocess.Popen(words)
    try:
        answer = box.launch([sys.executable, "-c", NODE, str(box.root / "tree"), str(seed)], grace_s=0.4)
        born = until(lambda: len(found := recorded(box)) == births(seed) and found)
        if orphaned:
            run = box.run(answer)
            until(lambda: {one for one in born if proc.living(one)} <= set(run.identities()[1]))
            supervisor = run.identities()[0]
            assert supervisor is not None
            signals.send_signal(supervisor, signal.SIGKILL)
            until(lambda: not run.live())
        told = box.stop("t")
        assert told["outcome"] == "killed" and told["survivors"] == []
        left = {one for one in recorded(box) if proc.living(one) is not None}
        assert left == set(), f"seed {seed}: {left} of {len(born)} live on"
        assert stranger.poll() is None
        return len(born)
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("orphaned", [False, True], ids=["supervised", "orphaned"])
@pytest.mark.parametrize("seed", [1.0, 2.0, 3.0])
def test_random_trees_are_ended(box: Any, until: Callable[..., Any], seed: float, orphaned: bool) -> None:
    assert run_tree(box, until, seed, orphaned) >= 2


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_random_trees_are_ended(box: Any, until: Callable[..., Any], seed: int) -> None:
    assert run_tree(box, until, float(seed), orphaned=bool(seed % 2)) >= 1
