"""On PYTHONPATH of some tests: ranks fail in the ways that DFLASH_TEST_FAULT says, "kind:rank:step,...". The
one process of a run is rank 0; a thread of the topology threads has its name in the place of a rank.

When the first of them did is written to the file DFLASH_TEST_FAULT_AT, as CLOCK_MONOTONIC in seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

WAIT_S = 4.0  # as in faulty_runs.py


def fail(kind: str) -> None:
    if kind == "slow":  # a disk that takes a checkpoint in ten minutes
        from trainer.checkpoint import files

        files.write = lambda *given: time.sleep(600)  # type: ignore[assignment]
        return
    if kind == "stuck" and len(os.environ["DFLASH_TEST_FAULT"].split(",")) > 1:  # that one is not the cause
        ctypes.PyDLL(None).sleep(600)
    told = Path(os.environ["DFLASH_TEST_FAULT_AT"])
    if not told.exists():
        told.write_text(str(time.monotonic()))
    if kind == "stuck":  # in one long call of a library, so that no signal is heard
        ctypes.PyDLL(None).sleep(600)
    if kind == "raise":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit-0":
        os._exit(0)
    if kind == "exit-3":
        os._exit(3)
    if kind == "thread":
        threading.Thread(target=fail, args=("raise",), name="pump").start()
        time.sleep(60)
    if kind == "hang":
        time.sleep(600)
    if kind == "nan":
        poison()
    if kind == "disk":
        fill(Path(os.environ["DFLASH_RUN_DIR"]) / "filler")


def everywhere() -> bool:
    return True


def poison(here: Callable[[], bool] = everywhere) -> None:
    """From now on this rank's gradients are not finite, and neither are the hidden states that it makes; of a
    thread, where it is `here`.
    """
    from trainer.model.target import Target
    from trainer.training.step import DrafterStep

    gradients, states = DrafterStep.gradients, Target.states

    def bad_gradients(self: DrafterStep, *given: Any, **named: Any) -> Any:
        sums = gradients(self, *given, **named)
        for parameter in self.drafter.parameters() if here() else ():
            parameter.grad = parameter.grad * float("nan")
        return sums

    def bad_states(self: Target, *given: Any, **named: Any) -> Any:
        made = states(self, *given, **named)
        if here():
            made.taps.fill_(float("nan"))
        return made

    drafts = int(os.environ.get("RANK", "0")) < int(os.environ.get("DFLASH_TEST_DRAFTERS", "99"))
    if drafts:
        DrafterStep.gradients = bad_gradients  # type: ignore[method-assign]
    if not drafts or here is not everywhere:
        Target.states = bad_states  # type: ignore[method-assign]


def fill(path: Path) -> None:
    """The disk, to its last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def fail_in(thread: str, kind: str) -> None:
    """From now on that thread does so when it works next. Threads wait no longer than WAIT_S for others."""
    from trainer.topology.crew import Crew
    from trainer.topology.threads import Threads

    wait, made, share = Crew.wait, Threads._made, Threads._share

    def bounded(self: Crew, ready: Any, deadline_s: float, what: Any) -> None:
        wait(self, ready, deadline_s if deadline_s == float("inf") else WAIT_S, what)

    def here() -> bool:
        return threading.current_thread().name == thread

    def then_made(self: Threads, *given: Any) -> Any:
        if here():
            fail(kind)
        return made(self, *given)

    def then_shared(self: Threads, *given: Any) -> Any:
        if here():
            fail(kind)
        return share(self, *given)

    Crew.wait = bounded  # type: ignore[method-assign]
    if kind == "nan":
        fail("mark")
        poison(here)
    else:
        Threads._made, Threads._share = then_made, then_shared  # type: ignore[method-assign]


def sabotage(faults: dict[int, list[tuple[str, str]]]) -> None:
    """faults: step -> kinds, and in whom."""
    from trainer.process import pace, runfiles

    pace.DEADLINE_S["training"] = 4.0
    stepped = runfiles.RunFiles.stepped

    def then_fail(self: runfiles.RunFiles, number: int) -> None:
        stepped(self, number)
        for kind, who in faults.get(number, []):
            if who.isdigit():
                fail(kind)
            else:
                fail_in(who, kind)

    runfiles.RunFiles.stepped = then_fail  # type: ignore[method-assign]


if "DFLASH_TEST_FAULT" in os.environ and {"rank", "alone"} & {*sys.orig_argv}:
    mine: dict[int, list[tuple[str, str]]] = {}
    for each in os.environ["DFLASH_TEST_FAULT"].split(","):
        kind, who, step = each.split(":")
        if not who.isdigit() or who == os.environ.get("RANK", "0"):
            mine.setdefault(int(step), []).append((kind, who))
    if mine:
        sabotage(mine)
