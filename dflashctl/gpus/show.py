"""The table of GPUs, and the same as JSON."""

from __future__ import annotations

import time
from typing import Any

from dflashctl.gpus.holders import Holder
from dflashctl.gpus.idle import NAMED, Box, Gpu
from dflashctl.render.text import clip, duration

COLUMNS = (">GPU", "NAME", ">MEMORY", ">UTIL", ">TEMP", ">POWER", ">SINCE", "HOLDER")
HOLDER_WIDTH = 100


def rows(box: Box, now: float | None = None) -> list[list[str]]:
    """One row a GPU. The last column names the holders, or why the GPU is not idle all the same. `now`: by
    the host's clock, which need not be the one here; by default the time of the look."""
    clock = now or box.at or time.time()
    return [row(gpu, clock) for gpu in box.gpus]


def row(gpu: Gpu, now: float) -> list[str]:
    reading = gpu.reading
    total = "" if reading.memory_total_mib is None else f" / {reading.memory_total_mib:,}"
    unknown = "-" if reading.is_shared else "?"
    since = min((holder.since for holder in gpu.holders if holder.since), default=None)
    return [
        str(reading.index),
        reading.name,
        unknown if reading.memory_used_mib is None else f"{reading.memory_used_mib:,}{total} MiB",
        unit(reading.utilization_pct, "%"),
        unit(reading.temperature_c, "C"),
        unit(None if reading.power_w is None else round(reading.power_w), "W"),
        duration(max(now - since, 0.0)) if since is not None else "-",
        holder_cell(gpu),
    ]


def holder_cell(gpu: Gpu) -> str:
    """`localtls (pid 312)`; `idle`; or the reason why it is neither."""
    labels = [clip(holder.label, HOLDER_WIDTH) for holder in gpu.holders[:NAMED]]
    if len(gpu.holders) > NAMED:
        labels.append(f"{len(gpu.holders) - NAMED} more: --json names all")
    if not gpu.readable or not gpu.holders:
        labels.insert(0, gpu.busy or "idle")
    return "\n".join(labels)


def unit(number: int | None, name: str) -> str:
    return "-" if number is None else f"{number} {name}"


def as_json(box: Box) -> dict[str, Any]:
    """Schema dflashctl.gpu/1."""
    return {
        "problem": box.problem,
        "warnings": list(box.warnings),
        "gpus": [gpu_json(gpu) for gpu in box.gpus],
    }


def gpu_json(gpu: Gpu) -> dict[str, Any]:
    reading = gpu.reading
    return {
        "index": reading.index,
        "uuid": reading.uuid,
        "name": reading.name,
        "memory_used_mib": reading.memory_used_mib,
        "memory_total_mib": reading.memory_total_mib,
        "utilization_pct": reading.utilization_pct,
        "temperature_c": reading.temperature_c,
        "power_w": reading.power_w,
        "mig": reading.mig,
        "idle": gpu.idle,
        "why_not_idle": gpu.busy or None,
        "reserved": list(gpu.reserved),
        "idle_memory_mib": gpu.limit_mib,
        "holders": [holder_json(holder) for holder in gpu.holders],
    }


def holder_json(holder: Holder) -> dict[str, Any]:
    return {
        "kind": holder.kind,
        "pid": holder.pid,
        "inner_pid": holder.inner_pid,
        "run": holder.run_id,
        "tag": holder.tag,
        "container": holder.container,
        "user": holder.user,
        "command": holder.command,
        "memory_mib": holder.memory_mib,
        "since": holder.since,
        "state": holder.state,
    }
