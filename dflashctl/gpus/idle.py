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
NAMED = 8
"""Holders of a GPU that people are told by name; a GPU that is shared out (MPS) has a hundred."""
SLICED = (
    "in MIG mode, so no run can have it whole; when nothing uses it, on the host: nvidia-smi -i {} -mig 0"
)


@dataclass(frozen=True)
class Gpu:
    """A GPU with its verdict: `busy` says why it is not idle, "" when it is. `readable`: a figure exists.
    `reserved`: tags of runs that have it by their record, also while they have not opened it yet."""

    reading: GpuReading
    holders: tuple[Holder, ...]
    limit_mib: int
    busy: str
    readable: bool = True
    reserved: tuple[str, ...] = ()

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
    at: float | None = None
    """When it was looked at, by the host's clock: what its holders' times count from."""

    @property
    def whole(self) -> tuple[Gpu, ...]:
        """Those that a run could ever be given."""
        return tuple(gpu for gpu in self.gpus if not gpu.reading.mig)

    def by_uuid(self, uuid: str) -> Gpu | None:
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


def judge_box(
    reading: SmiReading,
    held: Mapping[str, tuple[Holder, ...]],
    *,
    rule: IdleRule,
    baselines: Mapping[str, Any],
    expect: int | None,
    reserved: Mapping[str, tuple[str, ...]] | None = None,
) -> Box:
    """Verdicts for all GPUs, and whether as many are there as the box should have. `reserved`: GPU UUID ->
    tags of the runs that are not over and have it by their record."""
    warnings = list(reading.notes)
    if reading.apps_problem and not reading.problem:
        warnings.append(f"who holds the GPUs is not known: {reading.apps_problem}")
    if expect is not None and not reading.problem and len(reading.gpus) != expect:
        warnings.append(f"{len(reading.gpus)} of {expect} GPUs are visible")
    listed = {gpu.uuid for gpu in reading.gpus}
    unlisted = {uuid: who for uuid, who in held.items() if uuid not in listed}
    if not reading.problem:
        for uuid, who in unlisted.items():
            warnings.append(f"{uuid}, which nvidia-smi does not list, is held by {labels(who)}")
    gpus = tuple(
        judge(
            gpu,
            held.get(gpu.uuid, ()),
            (reserved or {}).get(gpu.uuid, ()),
            obscure="not known who holds it" if reading.apps_problem else None,
            limit=limit_mib(gpu.uuid, rule, baselines),
            rule=rule,
        )
        for gpu in reading.gpus
    )
    return Box(gpus, reading.problem, tuple(warnings))


def labels(held: tuple[Holder, ...]) -> str:
    more = [f"{len(held) - NAMED} more"] if len(held) > NAMED else []
    return "; ".join([*(holder.label for holder in held[:NAMED]), *more])


def limit_mib(uuid: str, rule: IdleRule, baselines: Mapping[str, Any]) -> int:
    """The most memory that this GPU may show while idle."""
    if rule.memory_mib != "auto":
        return rule.memory_mib
    learnt = baselines.get(uuid)
    level = learnt.get("memory_mib") if isinstance(learnt, Mapping) else 0
    return (level if isinstance(level, int) else 0) + TOLERANCE_MIB


def judge(
    gpu: GpuReading,
    held: tuple[Holder, ...],
    reserved: tuple[str, ...] = (),
    *,
    obscure: str | None,
    limit: int,
    rule: IdleRule,
) -> Gpu:
    """One GPU. The first reason found is the one shown, the gravest first.

    `obscure`: why it cannot be told who holds it, if it cannot.
    """
    busy, readable = "", True
    used, percent = gpu.memory_used_mib or 0, gpu.utilization_pct
    if gpu.problem:
        busy, readable = gpu.problem, False
    elif gpu.mig:
        busy, readable = SLICED.format(gpu.index), False
    elif obscure:
        busy, readable = obscure, False
    elif held:
        busy = "held by " + labels(held)
    elif reserved:
        busy = "reserved by " + ", ".join(reserved)
    elif used > limit:
        busy = f"{used:,} MiB in use (idle: {limit} MiB at most), and no process has it"
    elif percent is not None and percent > rule.utilization_pct:
        busy = f"utilisation {percent} % (idle: {rule.utilization_pct} %)"
    return Gpu(gpu, held, limit, busy, readable, reserved)


def reservations(
    inside: Mapping[str, Any], outside: Mapping[str, Any] | None = None, *, container: int | None = None
) -> dict[str, tuple[str, ...]]:
    """GPU UUID -> who has it, opened or not yet: tags of the runs (of inside_facts) that have it by
    their record, and of runs in other containers, which the host knows of (host_facts)."""
    found: dict[str, tuple[str, ...]] = {}
    runs = inside.get("runs") or ()
    for run in runs:
        for gpu in run.get("gpus") or ():
            uuid = str(gpu.get("uuid"))
            found[uuid] = (*found.get(uuid, ()), str(run.get("tag") or run.get("id")))
    known = {run.get("id") for run in runs}
    for entry in (outside or {}).get("reservations") or ():
        if entry.get("run") in known:
            continue
        where = entry.get("container")
        elsewhere = f" in container {where}" if where not in (None, container) else f" ({entry.get('run')})"
        for uuid in entry.get("uuids") or ():
            found[uuid] = (*found.get(uuid, ()), f"{entry.get('tag')}{elsewhere}")
    return found
