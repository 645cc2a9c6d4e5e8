"""Training runs in processes of their own, to be killed: forked from one that has imported torch once.

Each child is the real program's loop on a tiny target; nothing in it knows that it will be killed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trainer.run.train", "transformers.models.qwen3.modeling_qwen3"])


def small_library(folder: Path) -> Path:
    """A dozen files of the standard library as all there is: reading all takes longer than a tiny run."""
    from trainer.data import stdlib

    folder.mkdir()
    names = sorted(path.name for path in stdlib.root().glob("*.py") if stdlib.is_used(path.name))
    kept = [name for name in names if not stdlib.is_held_out(name)][:12]
    for name in [*kept, *(name for name in names if stdlib.is_held_out(name))]:
        (folder / name).symlink_to(stdlib.root() / name)
    return folder


def child(
    section: dict[str, Any], folder: str, resume: str | None, file_bytes: int | None, library: str
) -> None:
    """What runs in the child. Its output goes to `<folder>.log`; its exit code is the program's."""
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    from trainer import config as configs
    from trainer.data import stdlib
    from trainer.guard import guarded
    from trainer.process.runfiles import RunFiles
    from trainer.run.train import run

    torch.set_num_threads(1)
    stdlib.root = lambda: Path(library)
    files = RunFiles(Path(folder))
    files.listen()
    if file_bytes is not None:  # a write beyond it fails with EFBIG, as one on a full disk does with ENOSPC
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))

    def work() -> None:
        config = configs.load(section)
        run(config, files, lambda text: print(text, flush=True), None, Path(resume) if resume else None)

    code = guarded(work, files.fail)
    sys.stdout.flush()
    os._exit(code)


def start(
    section: dict[str, Any],
    folder: Path,
    resume: Path | None = None,
    file_bytes: int | None = None,
) -> ForkServerProcess:
    """Train in a child. The library of `small_library` lies beside the target."""
    library = Path(section["target"]["path"]).parent / "library"
    arguments = (section, str(folder), str(resume) if resume else None, file_bytes, str(library))
    process = CONTEXT.Process(target=child, args=arguments)
    process.start()
    return process


def finish(process: ForkServerProcess, folder: Path) -> tuple[int, str]:
    """Its exit code, negative for a signal, and all that it said."""
    process.join(DEADLINE_S)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"it did not end in {DEADLINE_S:.0f} s:\n{said(folder)}")
    return process.exitcode, said(folder)


def said(folder: Path) -> str:
    return Path(f"{folder}.log").read_text()


def wait_for(process: ForkServerProcess, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true before the process ended."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if process.exitcode is not None:
            return condition()
        assert time.monotonic() < deadline, "neither the condition nor the end came"
        time.sleep(0.0005)
    return True


def kill(process: ForkServerProcess) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)


def entries(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, without a line that a kill cut short."""
    found = []
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def step_of(folder: Path) -> int:
    return max((entry["step"] or 0 for entry in entries(folder)), default=0)


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) of each step; of the last time where a step was done twice."""
    return {
        entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in entries(folder) if "loss" in entry
    }
