"""The cells of --query-gpu and --query-compute-apps: names, headers, units and values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dflashctl.lab.gpu.holders import Holder
from dflashctl.lab.gpu.state import Box, Gpu

RESERVED_MIB = 616
"""What the driver keeps for itself on an H200; part of neither used nor free memory."""


@dataclass(frozen=True)
class View:
    """What one answer shows: the box, the GPUs that this caller sees, who holds them, and measured
    figures."""

    box: Box
    gpus: tuple[Gpu, ...]
    numbers: dict[str, int]
    """GPU uuid -> the index that this caller sees: GPUs that it cannot open are not counted (as observed)."""
    holders: tuple[Holder, ...]
    """Everybody: their memory is in use, listed or not."""
    listed: tuple[Holder, ...]
    """Those that this caller is told about."""
    lingering_mib: dict[int, int]
    utilization_pct: dict[int, int]

    def used_mib(self, gpu: Gpu) -> int:
        """Memory in use: baseline, leaks, holders and what lingers; 0 while the GPU requires a reset, as the
        real one says."""
        if gpu.fault == "reset":
            return 0
        held = sum(h.mib for h in self.holders if h.index == gpu.index)
        used = gpu.idle_mib + gpu.leaked_mib + held + self.lingering_mib.get(gpu.index, 0)
        return min(used, gpu.memory_total_mib)

    def free_mib(self, gpu: Gpu) -> int:
        """What is left for a holder, the driver's own reserve taken off."""
        return max(0, gpu.memory_total_mib - RESERVED_MIB - self.used_mib(gpu))

    def busy_pct(self, gpu: Gpu) -> int:
        """Utilisation in percent: forced by the state, else from the holders."""
        if gpu.utilization_pct is not None:
            return gpu.utilization_pct
        return self.utilization_pct.get(gpu.index, 0)


@dataclass(frozen=True)
class Field:
    """One column. `reset` marks cells that read `[GPU requires reset]` on a GPU in that state."""

    header: str
    unit: str
    value: Callable[[View, Gpu], str]
    reset: bool = False


def _timestamp(view: View, gpu: Gpu) -> str:
    now = time.time()
    return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03d}"


def _fixed(text: str) -> Callable[[View, Gpu], str]:
    return lambda view, gpu: text


_GPU_ROWS: tuple[tuple[str, str, Callable[[View, Gpu], str], bool], ...] = (
    ("timestamp", "", _timestamp, False),
    ("index", "", lambda v, g: str(v.numbers[g.uuid]), False),
    ("name", "", lambda v, g: g.name, False),
    ("uuid", "", lambda v, g: g.uuid, False),
    ("serial", "", lambda v, g: f"16540240{g.index:05d}", False),
    ("count", "", lambda v, g: str(len(v.numbers)), False),
    ("pci.bus_id", "", lambda v, g: g.bus, False),
    ("driver_version", "", lambda v, g: v.box.driver_version, False),
    ("vbios_version", "", _fixed("96.00.A5.00.1A"), False),
    ("compute_cap", "", _fixed("9.0"), False),
    ("pstate", "", _fixed("P0"), True),
    ("persistence_mode", "", _fixed("Enabled"), False),
    ("compute_mode", "", _fixed("Default"), False),
    ("mig.mode.current", "", _fixed("Disabled"), False),
    ("fan.speed", "%", _fixed("[N/A]"), False),
    ("memory.total", "MiB", lambda v, g: str(g.memory_total_mib), False),
    ("memory.reserved", "MiB", lambda v, g: str(RESERVED_MIB), False),
    ("memory.used", "MiB", lambda v, g: str(v.used_mib(g)), False),
    ("memory.free", "MiB", lambda v, g: str(v.free_mib(g)), False),
    ("utilization.gpu", "%", lambda v, g: str(v.busy_pct(g)), True),
    ("utilization.memory", "%", lambda v, g: str(v.busy_pct(g) // 2), True),
    ("temperature.gpu", "", lambda v, g: str(32 + v.busy_pct(g) // 3), True),
    ("power.draw", "W", lambda v, g: f"{77 + 6 * v.busy_pct(g):.2f}", True),
    ("power.limit", "W", _fixed("700.00"), True),
    ("clocks.current.sm", "MHz", lambda v, g: "1980" if v.busy_pct(g) else "345", True),
    ("pcie.link.gen.current", "", _fixed("5"), False),
    ("pcie.link.gen.max", "", _fixed("5"), False),
    ("pcie.link.width.current", "", _fixed("16"), False),
    ("pcie.link.width.max", "", _fixed("16"), False),
    ("ecc.mode.current", "", _fixed("Enabled"), True),
    ("ecc.errors.corrected.volatile.total", "", _fixed("0"), True),
    (
        "ecc.errors.uncorrected.volatile.total",
        "",
        lambda v, g: str(g.ecc_volatile_uncorrectable),
        True,
    ),
    (
        "ecc.errors.uncorrected.aggregate.total",
        "",
        lambda v, g: str(g.ecc_aggregate_uncorrectable),
        True,
    ),
    ("retired_pages.pending", "", _fixed("[N/A]"), False),
)
GPU_FIELDS = {name: Field(name, unit, value, reset) for name, unit, value, reset in _GPU_ROWS}
GPU_FIELDS |= {
    "clocks.sm": GPU_FIELDS["clocks.current.sm"],
    "gpu_name": GPU_FIELDS["name"],
    "gpu_uuid": GPU_FIELDS["uuid"],
    "gpu_serial": GPU_FIELDS["serial"],
    "gpu_bus_id": GPU_FIELDS["pci.bus_id"],
}


def gpu_cell(view: View, gpu: Gpu, name: str) -> str:
    """The value of one cell without its unit; bracketed words stand for what the GPU cannot tell."""
    field = GPU_FIELDS[name]
    forced = gpu.fields.get(field.header, gpu.fields.get(name))
    if forced is not None:
        return forced
    if gpu.fault == "reset" and field.reset:
        return "[GPU requires reset]"
    return field.value(view, gpu)


@dataclass(frozen=True)
class AppField:
    """One column of --query-compute-apps."""

    header: str
    unit: str
    value: Callable[[View, Gpu, Holder], str]


_APP_ROWS: tuple[tuple[str, str, Callable[[View, Gpu, Holder], str]], ...] = (
    ("timestamp", "", lambda v, g, h: _timestamp(v, g)),
    ("gpu_name", "", lambda v, g, h: g.name),
    ("gpu_bus_id", "", lambda v, g, h: g.bus),
    ("gpu_serial", "", lambda v, g, h: GPU_FIELDS["serial"].value(v, g)),
    ("gpu_uuid", "", lambda v, g, h: g.uuid),
    ("pid", "", lambda v, g, h: str(h.pid)),
    ("process_name", "", lambda v, g, h: h.name),
    ("used_gpu_memory", "MiB", lambda v, g, h: str(h.mib)),
)
APP_FIELDS = {name: AppField(name, unit, value) for name, unit, value in _APP_ROWS}
APP_FIELDS |= {"name": APP_FIELDS["process_name"], "used_memory": APP_FIELDS["used_gpu_memory"]}
