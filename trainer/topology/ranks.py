"""The processes of a run that work together: their group, and collectives that can neither hang silently nor
hide whose fault it was.

Control values travel through gloo, gradients through NCCL where they lie on GPUs. Every wait goes on beating,
has a deadline, and is named; a collective that fails because a peer is gone raises `PeerLost`, which the
launcher knows to be a consequence and never the cause.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import TrainerError
from trainer.shortage import is_shortage
from trainer.words import first_line

POLL_S = 0.0005
"""Between looks at a collective that is under way: they take about as long."""
MEET_S = 300.0
LIBRARY_WAIT_S = 24 * 3600.0
"""The library's own limit lies far above ours, which say what was waited for."""
SAID_CHARS = 300
"""Of the library's errors, whose first line may be a page."""

_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the later name first
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class PeerLost(TrainerError):
    """Another process of the run failed, or went away, or did not come in time."""

    exit_code = 76


class Ranks:
    """One process's place among `size`, and what they do together."""

    def __init__(self, beat: Callable[[], None]) -> None:
        """beat: called while waiting; may raise, which ends the wait."""
        self._beat, self._wait_s = beat, MEET_S
        self._group: dist.ProcessGroup | None = None  # None: all
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    @property
    def first(self) -> bool:
        """Whether this process is the one that measures, saves and reports."""
        return self.rank == 0

    def join(self, gpu: int | None, wait_s: float) -> None:
        """Meet the others.

        Args:
            gpu: this process's; None: it has none.
            wait_s: the longest wait of a collective from then on.
        Raises:
            PeerLost: they do not come.
        """
        if gpu is not None:
            torch.cuda.set_device(gpu)
        self._wait_s = wait_s
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host; a launcher of several names another
        backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=LIBRARY_WAIT_S))
        except (RuntimeError, ValueError) as error:
            if is_shortage(error):  # this rank's own
                raise
            raise PeerLost(
                f"the ranks did not meet: {first_line(error)[:SAID_CHARS]}", where=self._where
            ) from error

    def first_ones(self, count: int) -> Ranks | None:
        """The first `count` ranks as a group of their own; None for the others, who must call it too."""
        group = dist.new_group(list(range(count)))
        if self.rank >= count:
            return None
        fewer = Ranks(self._beat)
        fewer._wait_s, fewer._group, fewer.size = self._wait_s, group, count
        return fewer

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def add(self, tensor: Tensor, what: str) -> None:
        """Replace `tensor` by its sum over all ranks."""
        self._finish(lambda: dist.all_reduce(tensor, group=self._group, async_op=True), what)

    def add_share(self, tensor: Tensor, what: str) -> None:
        """Replace this rank's part of `tensor`, of as many equal parts as there are ranks, by its sum.

        Gloo begins its own only when it is waited for, which cannot be watched: there all of it is added.
        """
        if not tensor.is_cuda:
            self.add(tensor, what)
            return
        mine = tensor.chunk(self.size)[self.rank]
        added = torch.empty_like(mine)
        self._finish(lambda: _scatter(added, tensor, group=self._group, async_op=True), what)
        mine.copy_(added)

    def gather(self, tensor: Tensor, what: str) -> None:
        """Fill `tensor` with each rank's part of it."""
        mine = tensor.chunk(self.size)[self.rank].clone()
        self._finish(lambda: _gather(tensor, mine, group=self._group, async_op=True), what)

    def beat_with(self, beat: Callable[[], None]) -> None:
        """From now on call this while waiting."""
        self._beat = beat

    def from_first(self, values: Sequence[float], what: str, wait_s: float | None = None) -> list[float]:
        """The first rank's numbers, on every rank."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self._finish(lambda: dist.broadcast(tensor, 0, group=self._group, async_op=True), what, wait_s)
        return [float(value) for value in tensor]

    def meet(self, what: str, wait_s: float | None = None) -> None:
        """Wait until every rank is here."""
        tensor = torch.zeros(1)
        self._finish(lambda: dist.all_reduce(tensor, group=self._group, async_op=True), what, wait_s)

    def _finish(self, begin: Callable[[], dist.Work | None], what: str, wait_s: float | None = None) -> None:
        wait_s = self._wait_s if wait_s is None else wait_s
        end = time.monotonic() + wait_s
        try:
            work = begin()
            assert work is not None
            while not work.is_completed():
                if time.monotonic() > end:
                    raise PeerLost(
                        f"{what}: the other ranks did not come within {wait_s:.0f} s",
                        where=self._where,
                        next="dflashctl stacks TAG shows where they are; train.layout.wait_s is the deadline",
                    )
                self._beat()
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:
            if is_shortage(error):
                raise
            raise PeerLost(f"{what}: {first_line(error)[:SAID_CHARS]}", where=self._where) from error

    @property
    def _where(self) -> str:
        return f"rank {self.rank} of {self.size}"
