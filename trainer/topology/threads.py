"""The threaded topology: one process; target threads make batches of hidden states ahead of time, drafter
threads share each batch's rows.

    target threads -> Handover (bounded, in order) -> main thread -> one share of rows for each drafter thread
    main thread: gradients added up into the drafter, one optimizer step, new weights back to the copies

The drafter and its optimizer lie beside the first target, where evaluation needs both; each drafter thread
has a copy. A thread that dies ends the run at once, with its own error.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compile_policy import compile_forward, needs_compiler, refuse_unsound, setup_thread
from trainer.culprits import Culprits
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset
from trainer.errors import ConfigError
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.process.runfiles import RunFiles
from trainer.sections import TrainConfig
from trainer.topology.crew import Crew
from trainer.topology.handover import Handover
from trainer.topology.work import Bad, not_finite, row_gradients, shares
from trainer.training.loss import Sums
from trainer.training.step import DrafterStep

Say = Callable[[str], None]
Order = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Fed:
    """A step's batch, as a target thread made it."""

    batch: Batch
    bad: Bad | None


@dataclass(frozen=True)
class Ends:
    """The target's two ends on a drafter's device: all that a step needs of it."""

    device: torch.device
    embedding: nn.Module
    head_weight: Tensor


def devices_of(config: TrainConfig, kind: str, count: int) -> tuple[list[torch.device], list[torch.device]]:
    """The targets' devices and the drafters': a GPU each, in order; on a CPU all the same.

    Raises:
        ConfigError: fewer GPUs than the layout asks for.
    """
    layout = config.layout
    if kind != "cuda":
        return [torch.device(kind)] * layout.targets, [torch.device(kind)] * layout.drafters
    wanted = layout.targets + layout.drafters
    if count < wanted:
        raise ConfigError(
            f"{layout.targets} targets and {layout.drafters} drafters need {wanted} GPUs; torch sees {count}",
            where="train.layout",
            next="launch with more GPUs (launch.gpus), or use fewer of either",
        )
    devices = [torch.device("cuda", index) for index in range(wanted)]
    return devices[: layout.targets], devices[layout.targets :]


class Threads:
    """`Work` by threads."""

    def __init__(
        self,
        config: TrainConfig,
        files: RunFiles,
        say: Say,
        target: Target,
        drafter: Drafter,
        data: Dataset,
        order: Order,
        width: int,
        first: int,
    ) -> None:
        """
        Args:
            order: (step, batch rows) -> the batch's rows, indices into the data.
            width: anchors a row.
            first: the first step of this life of the run.
        Raises:
            ConfigError: too few GPUs, or a compile policy that is known to break.
        """
        self.config, self.files, self.say = config, files, say
        self._target, self._own = target, threading.Lock()  # the main thread measures with it too
        self.drafter, self.data, self.order = drafter, data, order
        cuda = target.device.type == "cuda"
        feeding, learning = devices_of(config, target.device.type, torch.cuda.device_count() if cuda else 0)
        needs_compiler(config.policy, cuda)
        refuse_unsound(config.policy, len(learning), torch.__version__, cuda, say)
        self.crew = Crew(files.beat)
        self.handover: Handover[Fed] = Handover(self.crew, config.layout.queue, config.layout.wait_s, first)
        self.copies = [copy.deepcopy(drafter).to(device).train() for device in learning]
        self.steps = [
            DrafterStep(each, _ends(target, device), config, width)
            for each, device in zip(self.copies, learning, strict=True)
        ]
        self.rows = shares(config.batch_rows, len(learning))
        self.job: tuple[int, Fed] | None = None
        self.sums: list[Sums | None] = [None] * len(learning)
        self.ready = [False] * len(learning)
        self.first = first
        self._culprits: Culprits | None = None
        for each in self.copies:
            compile_forward(each, config.policy, say)
        self._start(target, feeding)

    def _start(self, target: Target, feeding: list[torch.device]) -> None:
        policy = self.config.policy
        if policy.mode != "eager":
            self.files.enter("compiling")
        # On a GPU attention and loss compile also in mode eager: in the main thread, before there are others.
        in_main = policy.warmup == "main-thread" or (target.device.type == "cuda" and policy.mode == "eager")
        if in_main or policy.warmup == "own-thread":
            self._sample = self._made(self.first, target)
        if in_main:
            for worker in range(len(self.steps)):
                self._warm_up(worker)
        # Before any of them runs: a target that is being read is no target to copy.
        targets = [target, *(target.copied_to(device) for device in feeding[1:])]
        for number, mine in enumerate(targets):
            self.files.waited[f"room {number}"] = 0.0
            self.crew.start(f"target-{number}", partial(self._feed, mine, f"room {number}"))
        for worker in range(len(self.steps)):
            self.crew.start(f"drafter-{worker}", partial(self._learn, worker))
            if policy.start == "sequential":
                self._await_ready(worker)
        for worker in range(len(self.steps)):
            self._await_ready(worker)
        self.say(
            f"threads: {len(feeding)} target, {len(self.steps)} drafter, started {policy.start}, "
            f"mode {policy.mode}, warm-up {policy.warmup}, tls {policy.tls}"
        )

    def _await_ready(self, worker: int) -> None:
        self.crew.wait(lambda: self.ready[worker], self.config.layout.wait_s, f"drafter-{worker} to be ready")

    # In the threads

    def _feed(self, target: Target, room: str) -> None:
        if target.device.type == "cuda":
            torch.cuda.set_device(target.device)
        while True:
            number = self.handover.claim()
            with self._own if target is self._target else nullcontext():
                fed = self._made(number, target)
            with self.files.waiting(room):
                self.handover.put(number, fed)

    def _made(self, number: int, target: Target) -> Fed:
        index = self.order(number, self.config.batch_rows)
        batch, bad = self.data.batch(index, target)
        makers = [threading.current_thread().name] * len(index)
        return Fed(batch, None if bad is None else Bad(index, bad, makers))

    def _learn(self, worker: int) -> None:
        device = self.steps[worker].device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        setup_thread(self.config.policy)
        if self.config.policy.warmup == "own-thread":
            self._warm_up(worker)
        with self.crew.changing():
            self.ready[worker] = True
        done = self.first - 1
        while True:
            # No deadline: only the main thread gives work, and its own heartbeat has one.
            self.crew.wait(partial(self._newer, done), math.inf, "work")
            assert self.job is not None
            done, fed = self.job
            if done == self.first and self.config.policy.start == "sequential" and worker:
                before = worker - 1  # the first call compiles: one thread after the other
                self.crew.wait(partial(self._learnt, before), math.inf, f"drafter-{before}")
            sums = self._share(worker, done, fed)
            with self.crew.changing():
                self.sums[worker] = sums

    def _newer(self, done: int) -> bool:
        return self.job is not None and self.job[0] > done

    def _learnt(self, worker: int) -> bool:
        return self.sums[worker] is not None

    def _share(self, worker: int, number: int, fed: Fed) -> Sums:
        step, rows = self.steps[worker], self.rows[worker]
        batch = fed.batch.part(rows).to(step.device)
        return row_gradients(step, self.config, batch, number, rows)

    def _warm_up(self, worker: int) -> None:
        """A forward and a backward on the first batch; nothing of them stays but what was compiled."""
        self._share(worker, self.first, self._sample)
        self.copies[worker].zero_grad(set_to_none=True)

    # What the training loop calls

    def gradients(self, number: int) -> tuple[Sums, Bad | None]:
        """See `Work`. Raises what a thread raised; WaitedTooLong."""
        with self.files.waiting("hidden states"):
            fed = self.handover.take()
        with self.crew.changing():
            self.sums = [None] * len(self.steps)
            self.job = (number, fed)
        wait_s = self.config.layout.wait_s
        for worker in range(len(self.steps)):
            self.crew.wait(partial(self._learnt, worker), wait_s, f"step {number} of drafter-{worker}")
        if number == self.first and self.files.pace.phase == "compiling":
            self.files.enter("training")
        return self._gathered(), fed.bad

    def _gathered(self) -> Sums:
        """Add the copies' gradients into the drafter's, in one order whoever was first."""
        device = self.drafter.fc.weight.device
        bad = []
        for mine, sums in zip(self.copies, self.sums, strict=True):
            assert sums is not None
            gradients = [each.grad for each in mine.parameters() if each.grad is not None]
            bad.append(not_finite(gradients, sums.loss).to(device))
        for own, *others in zip(
            self.drafter.parameters(), *(each.parameters() for each in self.copies), strict=True
        ):
            found = [other.grad.to(own.device) for other in others if other.grad is not None]
            if found:
                own.grad = sum(found[1:], found[0])
            for other in others:
                other.grad = None
        total: Sums | None = None
        self._culprits = Culprits(torch.stack(bad), [f"drafter-{worker}" for worker in range(len(bad))])
        for sums in self.sums:
            assert sums is not None
            here = sums.to(device)
            total = here if total is None else total + here
        assert total is not None
        return total

    def culprits(self) -> Culprits | None:
        """See `Work`."""
        return self._culprits

    @torch.no_grad()
    def updated(self) -> None:
        """See `Work`."""
        for each in self.copies:
            for own, other in zip(self.drafter.parameters(), each.parameters(), strict=True):
                other.copy_(own)

    def depths(self) -> dict[str, int]:
        """See `Work`."""
        return {"hidden states": self.handover.waiting()}

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """See `Work`. Drafter threads wait anyway; the first target's is held before its next batch."""
        self.crew.wait(lambda: self._own.acquire(False), self.config.layout.wait_s, "the first target")
        try:
            yield
        finally:
            self._own.release()

    def close(self) -> None:
        """See `Work`."""
        self.crew.end()


def _ends(target: Target, device: torch.device) -> Any:
    if device == target.device:
        return target
    return Ends(device, copy.deepcopy(target.embedding).to(device), target.head_weight.to(device))
