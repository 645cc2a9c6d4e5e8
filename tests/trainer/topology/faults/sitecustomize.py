"""On PYTHONPATH of some tests: ranks fail in the ways that DFLASH_TEST_FAULT says, "kind:rank:step,...".

When the first of them did is written to the file DFLASH_TEST_FAULT_AT, as CLOCK_MONOTONIC in seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def fail(kind: str) -> None:
    if kind == "stuck":  # in one long call of a library, so that no signal is heard
        ctypes.PyDLL(None).sleep(600)
        return
    if kind == "slow":  # a disk that takes a checkpoint in ten minutes
        from trainer.checkpoint import files

        files.write = lambda *given: time.sleep(600)  # type: ignore[assignment]
        return
    told = Path(os.environ["DFLASH_TEST_FAULT_AT"])
    if not told.exists():
        told.write_text(str(time.monotonic()))
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


def poison() -> None:
    """From now on this rank's gradients are not finite, and neither are the hidden states that it makes."""
    from trainer.model.target import Target
    from trainer.training.step import DrafterStep

    gradients, states = DrafterStep.gradients, Target.states

    def bad_gradients(self: DrafterStep, *given: Any, **named: Any) -> Any:
        sums = gradients(self, *given, **named)
        for parameter in self.drafter.parameters():
            parameter.grad = parameter.grad * float("nan")
        return sums

    def bad_states(self: Target, *given: Any, **named: Any) -> Any:
        made = states(self, *given, **named)
        made.taps.fill_(float("nan"))
        return made

    if int(os.environ["RANK"]) < int(os.environ.get("DFLASH_TEST_DRAFTERS", "99")):
        DrafterStep.gradients = bad_gradients  # type: ignore[method-assign]
    else:
        Target.states = bad_states  # type: ignore[method-assign]


def fill(path: Path) -> None:
    """The disk, to its last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def sabotage(faults: dict[int, list[str]]) -> None:
    """faults: step -> kinds."""
    from trainer.run import runfiles

    runfiles.DEADLINE_S["training"] = 4.0
    stepped = runfiles.RunFiles.stepped

    def then_fail(self: runfiles.RunFiles, number: int) -> None:
        stepped(self, number)
        for kind in faults.get(number, []):
            fail(kind)

    runfiles.RunFiles.stepped = then_fail  # type: ignore[method-assign]


if "DFLASH_TEST_FAULT" in os.environ and "rank" in sys.orig_argv:
    mine: dict[int, list[str]] = {}
    for each in os.environ["DFLASH_TEST_FAULT"].split(","):
        kind, rank, step = each.split(":")
        if rank == os.environ.get("RANK"):
            mine.setdefault(int(step), []).append(kind)
    if mine:
        sabotage(mine)
