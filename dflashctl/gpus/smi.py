"""nvidia-smi's CSV answers as data. Pure; the texts are those of `agent/gpus/hostfacts.py`.

Its errors come on stdout, so the exit code is looked at first, and no cell is trusted to be a number:
`[N/A]`, `[Not Supported]`, `[Unknown Error]` and `[GPU requires reset]` stand where numbers do.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

GPU_COLUMNS = (
    "index",
    "uuid",
    "memory.used",
    "memory.total",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "name",
)
"""What every driver knows; the answer says itself what it was asked (`fields` of agent.gpus.hostfacts)."""
APP_COLUMNS = 4  # agent.gpus.hostfacts.APP_FIELDS
UNSUPPORTED = ("[N/A]", "[Not Supported]", "N/A", "")
"""The card has no such sensor: says nothing about its health."""

MEANINGS = (
    (
        "Unknown Error",
        "the driver cannot be reached from there (device access lost); a reboot or new cgroup rules help",
    ),
    ("version mismatch", "the driver was updated while in use; reboot the host"),
    ("communicate with the NVIDIA driver", "no NVIDIA driver is loaded"),
    ("libnvidia-ml.so", "the NVIDIA libraries are not installed there"),
    ("GPU access blocked", "no access to /dev/nvidiactl"),
    ("No devices were found", "no GPU is visible there"),
)
"""What a person should read behind NVML's words."""

MOST_SAID = 400
"""Characters of an answer that is none: a person reads them in one line."""

WARNED = 14
"""nvidia-smi's exit code for a damaged infoROM: it says so, and all the same reads everything."""

LOST = re.compile(
    r"GPU\s?(?P<index>\d+)?:? ?(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])"
)


@dataclass(frozen=True)
class GpuReading:
    """One GPU in one or several samples. None: the cell holds no number. utilization_pct is the median.
    Without used and total memory, and without a problem, it shares the machine's (`is_shared`)."""

    index: int
    uuid: str
    name: str
    memory_used_mib: int | None
    memory_total_mib: int | None
    utilization_pct: int | None
    temperature_c: int | None
    power_w: float | None
    problem: str | None = None
    """Why the figures cannot be believed: "requires reset", "memory.used reads [Unknown Error]"."""
    mig: bool | None = None
    """In MIG mode: programs see its slices, if any are made, and never itself. None: it is not told."""

    @property
    def is_shared(self) -> bool:
        """It has no memory of its own (GB10, Jetson): holders and utilisation alone tell of it."""
        return self.problem is None and self.memory_used_mib is None and self.memory_total_mib is None


@dataclass(frozen=True)
class App:
    """A process that nvidia-smi lists; pid as the driver's machine counts, 0 for one that it hides."""

    pid: int
    uuid: str
    memory_mib: int | None
    name: str


@dataclass(frozen=True)
class SmiReading:
    """Everything that was read. `problem`: nothing could be read, and why. `apps_problem`: it is not known
    who holds a GPU. `notes`: GPUs that the answer complained about."""

    gpus: tuple[GpuReading, ...] = ()
    apps: tuple[App, ...] = ()
    problem: str | None = None
    apps_problem: str | None = None
    notes: tuple[str, ...] = ()


def read(facts: Mapping[str, Any]) -> SmiReading:
    """The answer of the operation `host_facts` as data: samples merged, applications listed."""
    samples: list[tuple[GpuReading, ...]] = []
    columns = tuple((facts.get("fields") or {}).get("gpu") or GPU_COLUMNS)
    problem: str | None = "nvidia-smi was not asked"
    notes: list[str] = []
    for sample in facts.get("samples", ()):
        gpus, problem, said = parse_gpus(sample, columns)
        notes += [note for note in said if note not in notes]
        if problem:
            break
        samples.append(gpus)
    apps, apps_problem = parse_apps(facts.get("apps") or {})
    merged = () if problem else merge(samples)
    return SmiReading(merged, apps, problem, apps_problem, tuple(notes))


def parse_gpus(
    reading: Mapping[str, Any], columns: Sequence[str] = GPU_COLUMNS
) -> tuple[tuple[GpuReading, ...], str | None, tuple[str, ...]]:
    """(GPUs, why there are none, complaints about single ones) of one --query-gpu answer.

    A lost GPU makes newer drivers exit with an error and list the others all the same: rows are taken
    whatever the exit code says, and an error without any row is the answer's failure.
    """
    rows, complaints = [], []
    for line in _lines(reading):
        gpu = parse_gpu(line, columns)
        if gpu is not None:
            rows.append(gpu)
        else:
            complaints.append(line)
    if rows and _believed(reading, complaints):
        return tuple(sorted(rows, key=lambda gpu: gpu.index)), None, tuple(complaints)
    return (), failure(reading, "nvidia-smi lists no GPU"), ()


def parse_gpu(line: str, columns: Sequence[str] = GPU_COLUMNS) -> GpuReading | None:
    """One row; None when the line is a message."""
    cells = [cell.strip() for cell in line.split(",", len(columns) - 1)]
    if len(cells) != len(columns):
        return None
    row = dict(zip(columns, cells, strict=True))
    if not row["index"].isdecimal() or not row["uuid"].startswith(("GPU-", "MIG-")):
        return None
    problem = None
    for name in ("memory.used", "memory.total", "utilization.gpu"):
        cell = row[name]
        if "requires reset" in cell:
            problem = "requires reset"
        elif _number(cell) is None and cell not in UNSUPPORTED and problem is None:
            problem = f"{name} reads {cell}"
    used, total, percent = (_number(row[name]) for name in ("memory.used", "memory.total", "utilization.gpu"))
    bare = row["memory.used"] in UNSUPPORTED[:3] and row["memory.total"] in UNSUPPORTED[:3]
    if used is None and problem is None and not (bare and percent is not None):
        problem = f"memory.used reads {row['memory.used'] or 'nothing'}"
    return GpuReading(
        index=int(row["index"]),
        uuid=row["uuid"],
        name=row["name"],
        memory_used_mib=_integer(used),
        memory_total_mib=_integer(total),
        utilization_pct=_integer(percent),
        temperature_c=_integer(_number(row["temperature.gpu"])),
        power_w=_number(row["power.draw"]),
        problem=problem,
        mig={"Enabled": True, "Disabled": False}.get(row.get("mig.mode.current", "")),
    )


def merge(samples: Sequence[Sequence[GpuReading]]) -> tuple[GpuReading, ...]:
    """Several samples as one: the last figures, the largest memory, the median utilisation. One that is
    missing from a sample, or unwell in one, is unwell."""
    if not samples:
        return ()
    merged = []
    uuids = {gpu.uuid for sample in samples for gpu in sample}
    for uuid in uuids:
        seen = [gpu for sample in samples for gpu in sample if gpu.uuid == uuid]
        problem = next((gpu.problem for gpu in seen if gpu.problem), None)
        if problem is None and len(seen) < len(samples):
            problem = "comes and goes"
        used = [gpu.memory_used_mib for gpu in seen if gpu.memory_used_mib is not None]
        busy = [gpu.utilization_pct for gpu in seen if gpu.utilization_pct is not None]
        merged.append(
            replace(
                seen[-1],
                memory_used_mib=max(used) if used else None,
                utilization_pct=round(statistics.median(busy)) if busy else None,
                problem=problem,
            )
        )
    return tuple(sorted(merged, key=lambda gpu: gpu.index))


def parse_apps(reading: Mapping[str, Any]) -> tuple[tuple[App, ...], str | None]:
    """(processes on GPUs, why that is not known). No output at all is the answer of an idle box."""
    lines = _lines(reading)
    if not _believed(reading, lines):
        return (), failure(reading, "nvidia-smi does not say who uses the GPUs")
    apps = []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",", APP_COLUMNS - 1)]
        if len(cells) == APP_COLUMNS and (cells[0].isdecimal() or cells[2].startswith(("GPU-", "MIG-"))):
            pid = int(cells[0]) if cells[0].isdecimal() else 0
            apps.append(App(pid, cells[2], _integer(_number(cells[1])), cells[3]))
    return tuple(apps), None


def _believed(reading: Mapping[str, Any], complaints: Sequence[str]) -> bool:
    return reading.get("exit") in (0, WARNED) or any(LOST.search(line) for line in complaints)


def failure(reading: Mapping[str, Any], otherwise: str) -> str:
    """Why an answer is no answer, in words."""
    problem = reading.get("problem")
    if problem == "missing":
        return "there is no nvidia-smi"
    if problem == "timeout":
        return "nvidia-smi does not answer (it hangs in the driver)"
    if problem:
        return f"nvidia-smi cannot be run: {problem}"
    said = " ".join(_lines(reading)) or " ".join(str(reading.get("stderr") or "").split()) or otherwise
    said = said if len(said) <= MOST_SAID else said[:MOST_SAID] + " ..."
    meaning = next((meaning for words, meaning in MEANINGS if words in said), "")
    code = f" (exit code {reading.get('exit')})" if reading.get("exit") else ""
    return f"{said}{code}" + (f": {meaning}" if meaning else "")


def _lines(reading: Mapping[str, Any]) -> list[str]:
    return [line.strip() for line in str(reading.get("stdout") or "").splitlines() if line.strip()]


def _number(cell: str) -> float | None:
    """`18203`, `18203 MiB`, `61.20 W`; None for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: ?(?:MiB|%|W|C))?", cell)
    return float(match[1]) if match else None


def _integer(number: float | None) -> int | None:
    return None if number is None else round(number)
