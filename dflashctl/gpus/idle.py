"""When a GPU is idle. Pure.

Idle: it can be read, nobody holds it, its memory is at its idle level, and its median utilisation is low. A
fixed "0 MiB" would be wrong both ways: drivers, displays and ECC keep a few MiB on an idle card, and memory
that a dead process left behind is a fault to show, however little. So the idle level is, in this order: a
number in hosts.yaml (`gpus.idle.memory_mib`); what `dflashctl gpu --learn-idle` has learnt for this GPU,
by UUID; or 0. TOLERANCE_MIB is allowed above a learnt level or 0: the driver's own bookkeeping moves by a few
MiB from one moment to the next, while the smallest CUDA context takes a few hundred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflashctl.config.hosts import IdleRule
from dflashctl.gpus.holders import Holder
from dflashctl.gpus.smi import GpuReading, SmiReading

TOLERANCE_MIB = 64


@dataclass(frozen=True)
class Gpu:
    """A GPU with its verdict: `busy` says why it is not idle, "" when it is. `readable`: a figure exists."""

    reading: GpuReading
    holders: tuple[Holder, ...]
    limit_mib: int
    busy: str
    readable: bool = True

    @property
    def index(self) -> int:
        return self.reading.index

    @property
    def uuid(self) -> str:
        return self.reading.uuid

    @property
    def idle(self) -> bool:
        return not self.busy


@dataclass(frozen=True)
class Box:
    """All GPUs of a host. `problem`: none could be read, and why; `warnings`: what else is wrong."""

    gpus: tuple[Gpu, ...]
    problem: str | None = None
    warnings: tuple[str, ...] = ()

    def by_uuid(self, uuid: str) -> Gpu | None:
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


def judge_box(
    reading: SmiReading,
    held: Mapping[str, tuple[Holder, ...]],
    *,
    rule: IdleRule,
    baselines: Mapping[str, Any],
    expect: int | None,
) -> Box:
    """Verdicts for all GPUs, and whether as many are there as the box should have."""
    warnings = list(reading.notes)
    if reading.apps_problem and not reading.problem:
        warnings.append(f"who holds the GPUs is not known: {reading.apps_problem}")
    if expect is not None and not reading.problem and len(reading.gpus) != expect:
        warnings.append(f"{len(reading.gpus)} of {expect} GPUs are visible")
    gpus = tuple(
        judge(gpu, held.get(gpu.uuid, ()), reading.apps_problem, limit_mib(gpu.uuid, rule, baselines), rule)
        for gpu in reading.gpus
    )
    return Box(gpus, reading.problem, tuple(warnings))


def limit_mib(uuid: str, rule: IdleRule, baselines: Mapping[str, Any]) -> int:
    """The most memory that this GPU may show while idle."""
    if rule.memory_mib != "auto":
        return rule.memory_mib
    learnt = baselines.get(uuid)
    level = learnt.get("memory_mib") if isinstance(learnt, Mapping) else 0
    return (level if isinstance(level, int) else 0) + TOLERANCE_MIB


def judge(
    gpu: GpuReading, held: tuple[Holder, ...], apps_problem: str | None, limit: int, rule: IdleRule
) -> Gpu:
    """One GPU. The first reason found is the one shown, the gravest first."""
    if gpu.problem:
        return Gpu(gpu, held, limit, gpu.problem, readable=False)
    if apps_problem:
        return Gpu(gpu, held, limit, "not known who holds it", readable=False)
    if held:
        return Gpu(gpu, held, limit, "held by " + "; ".join(holder.label for holder in held))
    used = gpu.memory_used_mib or 0
    if used > limit:
        return Gpu(
            gpu, held, limit, f"{used:,} MiB in use (idle: {limit} MiB at most), and no process has it"
        )
    if gpu.utilization_pct is not None and gpu.utilization_pct > rule.utilization_pct:
        return Gpu(gpu, held, limit, f"utilisation {gpu.utilization_pct} % (idle: {rule.utilization_pct} %)")
    return Gpu(gpu, held, limit, "")
