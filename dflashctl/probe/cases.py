"""Which probes there are, and the question behind each of their programs. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflashctl.errors import UsageError

ALL = 0
"""Of `Probe.gpus`: every idle one."""


@dataclass(frozen=True)
class Case:
    """One program in one process. `gpus`: so many it needs; `compiler`: Inductor builds with one."""

    name: str
    question: str
    gpus: int = 1
    compiler: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """`gpus`: how many it gets unless the person says otherwise, or ALL; of them as many as are idle."""

    name: str
    gpus: int
    cases: tuple[Case, ...]

    def chosen(self, names: str | None) -> tuple[Case, ...]:
        """The cases of `--case a,b`, in the probe's order; all for None. Raises UsageError."""
        if names is None:
            return self.cases
        wanted = {name.strip() for name in names.split(",")}
        unknown = sorted(wanted - {case.name for case in self.cases})
        if unknown:
            known = ", ".join(case.name for case in self.cases)
            raise UsageError(f"probe {self.name} has no case {unknown[0]!r}", next=f"its cases: {known}")
        return tuple(case for case in self.cases if case.name in wanted)


GRAPHS = "mode reduce-overhead"

PROBES = {
    probe.name: probe
    for probe in (
        Probe(
            "threads",
            1,
            (
                Case("main-thread", f"{GRAPHS} in the main thread", compiler=True),
                Case("one-thread", f"{GRAPHS} in one threading.Thread", compiler=True),
                Case("threads-at-once", f"{GRAPHS} in three threads at once", compiler=True),
                Case(
                    "warm-main-replay-thread",
                    "recorded in the main thread, replayed in another",
                    compiler=True,
                ),
                Case("local-tls", "one thread, Python's threading.local set by hand", compiler=True),
                Case("stashed-tls", "one thread, the objects stashed in C as well", compiler=True),
                Case("trees-off", "cudagraph_trees = False in one thread", compiler=True),
                Case("trees-off-threads-at-once", "cudagraph_trees = False in three threads", compiler=True),
                Case("inductor", "Inductor without graphs in the main thread", gpus=0, compiler=True),
                Case(
                    "inductor-threads-at-once",
                    "Inductor without graphs in three threads",
                    gpus=0,
                    compiler=True,
                ),
                Case("own-capture", "our own torch.cuda.graph, nothing compiled"),
            ),
        ),
        Probe(
            "step",
            1,
            (
                Case("compiled", "a compiled training step equals the plain one", gpus=0, compiler=True),
                Case("captured", "a captured training step equals the plain one"),
            ),
        ),
        Probe(
            "p2p",
            ALL,
            (
                Case("peer-access", "each GPU reaches each other's memory", gpus=2),
                Case("copies", "copies between each two arrive right", gpus=2),
            ),
        ),
        Probe(
            "ipc",
            2,
            (
                Case("host-memory", "two processes share host memory (/dev/shm)", gpus=0),
                Case("one-gpu", "two processes share memory of one GPU (CUDA IPC)"),
                Case("two-gpus", "a process on another GPU writes it", gpus=2),
                Case(
                    "expandable-segments",
                    "CUDA IPC with expandable_segments:True",
                    env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
                ),
            ),
        ),
        Probe(
            "nccl",
            ALL,
            (
                Case("gloo", "all-reduce of two processes on the host", gpus=0),
                Case("one-gpu", "a NCCL communicator of one rank"),
                Case("all-gpus", "all-reduce by NCCL, a process for each GPU", gpus=2),
            ),
        ),
    )
}
