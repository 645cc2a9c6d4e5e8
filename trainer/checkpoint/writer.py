"""Writing checkpoints while training goes on.

The main thread copies everything into host memory between two steps; a thread writes that copy. There is one
copy and one thread, so never two writes at once: who comes too early waits, or comes again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import files as checkpoint
from trainer.errors import Stopped
from trainer.model.drafter import Drafter
from trainer.training.optim import DrafterOptimizer
from trainer.writing import lock

POLL_S = 0.2


class HostCopies:
    """Copies of named tensors in host memory, reserved once, and page-locked where a GPU copies into it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """A copy that is complete after `wait`; it overwrites the last one of this name."""
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return self.reserve(name, tensor.shape, tensor).copy_(tensor.detach(), non_blocking=True)

    def reserve(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Where copies of `name` will lie, of this shape and otherwise `like` this."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != torch.Size(shape) or buffer.dtype != like.dtype:
            buffer = torch.empty(torch.Size(shape), dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = buffer
        return buffer

    def wait(self) -> None:
        """Until every copy is complete."""
        for device in self._devices:
            torch.cuda.synchronize(device)


class Writer:
    """The one writer of a run's checkpoints."""

    def __init__(self, root: Path, keep: int, writes: bool = True) -> None:
        """
        Args:
            writes: False: another rank of this run does, and this one has no copies in host memory.
        Raises:
            ConfigError: another process writes there.
        """
        self.root, self.keep = root, keep
        root.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = None
        if writes:
            self._lock = lock(root.parent / "trainer.lock")
            checkpoint.sweep(root)
        self.copies = HostCopies() if writes else None
        self._thread: threading.Thread | None = None
        self._step = 0
        self._done: list[tuple[int, Path | BaseException]] = []
        self.left: dict[Path, OSError] = {}  # beside what was written; see `checkpoint.settle`

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(
        self, step: int, drafter: Drafter, optimizer: DrafterOptimizer, facts: dict[str, Any], best: bool
    ) -> None:
        """Copy now, write in the background; the outcome comes from `outcomes`."""
        if self.busy:
            raise RuntimeError(f"the checkpoint of step {self._step} is still being written")
        if self.copies is None:
            raise RuntimeError("another rank writes the checkpoints of this run")
        snapshot = checkpoint.take(step, drafter, optimizer, facts, best, self.copies)
        self.copies.wait()
        self._step = step
        self._thread = threading.Thread(target=self._work, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def _work(self, snapshot: checkpoint.Snapshot) -> None:
        outcome: Path | BaseException
        try:
            outcome = checkpoint.write(self.root, snapshot)
            self.left = self.left | checkpoint.settle(self.root, outcome, snapshot.best, self.keep)
        except BaseException as error:  # whatever it is, the main thread hears of it
            outcome = error
        self._done.append((snapshot.step, outcome))

    def outcomes(self) -> list[tuple[int, Path | OSError]]:
        """(step, the folder or why not) of the writes that have ended since the last call.

        Raises:
            BaseException: what a write failed of, unless it was the disk's fault.
        """
        ended = []
        while self._done:  # one by one: the thread may add to it meanwhile
            ended.append(self._done.pop(0))
        for _, outcome in ended:
            if isinstance(outcome, BaseException) and not isinstance(outcome, OSError):
                raise outcome
        return [(step, outcome) for step, outcome in ended if isinstance(outcome, (Path, OSError))]

    def finish(self, beat: Callable[[], None]) -> None:
        """Wait until nothing is being written. A stop that comes meanwhile is raised after that."""
        stop: Stopped | None = None
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(POLL_S)
            try:
                beat()
            except Stopped as stopped:
                stop = stopped
        self._thread = None
        if stop is not None:
            raise stop

    def close(self) -> None:
        """Wait, and let others write there."""
        if self._thread is not None:
            self._thread.join()
        if self._lock is not None:
            os.close(self._lock)
