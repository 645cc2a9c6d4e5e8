"""What this process may use: cores, memory and device; and what it took at most."""

from __future__ import annotations

import gc
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")
CGROUP_MEMORY_CURRENT = Path("/sys/fs/cgroup/memory.current")


def usable_cores(cpu_max: Path = CGROUP_CPU_MAX) -> int:
    """Cores of this process's affinity mask, or fewer when its cgroup has a quota (as containers' have)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return min(cores, max(1, math.floor(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def multiplies_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the processor itself has bfloat16 products; without them they are slower than float32's."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = {flag for line in text.splitlines() for flag in line.partition(":")[2].split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})  # x86's two, Arm's one


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (proc(5), field 22 of stat). None: it does not run.

    With the pid, an identity: a later process with the same pid started later.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def prepare_environment() -> None:
    """Settings that only count before torch is imported.

    With other work on the cores, OpenMP threads that spin at barriers burn the time that their siblings need.
    Waiting passively costs little on an idle machine; on a busy one, steps took a seventh of the time.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def importing() -> Iterator[None]:
    """For the first import of torch and transformers: they make 360,000 objects and leave no garbage, and
    collections that look through all of them, again and again, took a fifth of the time of the import.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def choose_device(wish: str, named_by: str) -> torch.device:
    """The GPU, if torch sees one and the wish (auto, cpu or cuda) is not cpu; else the CPU.

    Raises:
        ConfigError: `named_by` asks for a GPU, and torch sees none.
    """
    import torch

    sees_one = torch.cuda.is_available()
    if wish == "cuda" and not sees_one:
        raise ConfigError("torch sees no CUDA device", where=named_by, next="say auto or cpu")
    return torch.device("cuda" if wish != "cpu" and sees_one else "cpu")


def available_memory(
    meminfo: Path = MEMINFO, limit: Path = CGROUP_MEMORY_MAX, used: Path = CGROUP_MEMORY_CURRENT
) -> int | None:
    """Bytes that this process may still take: the machine's, or its cgroup's where that is less.

    None: not to be found out. What the cgroup counts as used includes the page cache, which the kernel gives
    back; so half of the limit is always taken as available.
    """
    found = []
    try:
        kib = next(
            line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")
        )
        found.append(1024 * int(kib))
    except (OSError, ValueError, StopIteration):
        pass
    try:
        most = int(limit.read_text())
        found.append(max(most - int(used.read_text()), most // 2))
    except (OSError, ValueError):  # no such file, or "max": no limit
        pass
    return min(found) if found else None


def peaks() -> dict[str, float]:
    """GiB of memory that this process's tensors took at most, by GPU; without one, all of the process.

    A GPU that the process does not use is not named.
    """
    import torch

    if not torch.cuda.is_initialized():
        return {"cpu": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    found = {f"cuda:{gpu}": torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count())}
    return {name: size / 2**30 for name, size in found.items() if size}
