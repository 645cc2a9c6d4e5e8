"""On PYTHONPATH of some tests: one rank fails in the way that DFLASH_TEST_FAULT says, "kind:rank:step"."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time


def fail(kind: str) -> None:
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


def sabotage(kind: str, step: int) -> None:
    from trainer.run import runfiles

    runfiles.DEADLINE_S["training"] = 4.0
    stepped = runfiles.RunFiles.stepped

    def then_fail(self: runfiles.RunFiles, number: int) -> None:
        stepped(self, number)
        if number == step:
            fail(kind)

    runfiles.RunFiles.stepped = then_fail  # type: ignore[method-assign]


if "DFLASH_TEST_FAULT" in os.environ and "rank" in sys.orig_argv:
    kind, rank, step = os.environ["DFLASH_TEST_FAULT"].split(":")
    if rank == os.environ.get("RANK"):
        sabotage(kind, int(step))
