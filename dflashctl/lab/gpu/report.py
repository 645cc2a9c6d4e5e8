"""The longer texts: `nvidia-smi` alone, `topo -m`, and `-q` as far as a person asks it for health.

Layout as printed by driver 580 on H200s. NVML keeps no Xid history that -q would print: an Xid goes to the
kernel's log. What -q shows are its consequences (ECC counters, pending row remaps, a GPU that requires a
reset), so that is what a Xid in the state does here."""

from __future__ import annotations

import time

from dflashctl.lab.gpu.fields import RESERVED_MIB, View, gpu_cell
from dflashctl.lab.gpu.state import Gpu

SECTIONS = ("MEMORY", "UTILIZATION", "ECC", "TEMPERATURE", "POWER", "COMPUTE", "PIDS", "ROW_REMAPPER")
"""What -d accepts here."""

_ROW_REMAP_XIDS = {63, 64, 94, 95}
_RESET_XIDS = {48, 64, 74, 79, 95, 119, 120, 140}

_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def topology(view: View) -> str:
    """`topo -m`: all GPUs joined by 18 NVLinks, the first half on NUMA node 0, the rest on node 1."""
    half = (len(view.box.gpus) + 1) // 2
    names = [f"GPU{view.numbers[g.uuid]}" for g in view.gpus]
    header = "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\t\x1b[4m{header}\x1b[0m"]  # underlined also into a pipe, as observed
    for gpu in view.gpus:
        node = 0 if gpu.index < half else 1
        cells = [" X " if other.index == gpu.index else "NV18" for other in view.gpus]
        cpus = "0-47,96-143" if node == 0 else "48-95,144-191"
        lines.append("\t".join([f"GPU{view.numbers[gpu.uuid]}", *cells, cpus, str(node), "", "N/A"]))
    return "\n".join(lines) + "\n" + _LEGEND + "\n"


def _row(depth: int, key: str, value: str | None = None, width: int = 55) -> str:
    text = " " * 4 * depth + key
    return text if value is None else f"{text:<{width}}: {value}"


def _ecc(view: View, gpu: Gpu) -> list[str]:
    volatile, aggregate = gpu.ecc_volatile_uncorrectable, gpu.ecc_aggregate_uncorrectable
    rows = [_row(1, "ECC Mode"), _row(2, "Current", "Enabled"), _row(2, "Pending", "Enabled")]
    rows += [_row(1, "ECC Errors")]
    for title, dram in (("Volatile", volatile), ("Aggregate", aggregate)):
        rows += [
            _row(2, title),
            _row(3, "SRAM Correctable", "0"),
            _row(3, "SRAM Uncorrectable Parity", "0"),
            _row(3, "SRAM Uncorrectable SEC-DED", "0"),
            _row(3, "DRAM Correctable", "0"),
            _row(3, "DRAM Uncorrectable", str(dram)),
        ]
    rows += [_row(3, "SRAM Threshold Exceeded", "No"), _row(2, "Aggregate Uncorrectable SRAM Sources")]
    rows += [_row(3, f"SRAM {part}", "0") for part in ("L2", "SM", "Microcontroller", "PCIE", "Other")]
    rows += [_row(2, f"{what} Repair Pending", "No") for what in ("Channel", "TPC")]
    return [*rows, _row(2, "Unrepairable Memory", "No")]


def _row_remapper(view: View, gpu: Gpu) -> list[str]:
    hits = _ROW_REMAP_XIDS & set(gpu.xid)
    return [
        _row(1, "Remapped Rows"),
        _row(2, "Correctable Error", "0"),
        _row(2, "Inactive Correctable Error", "0"),
        _row(2, "Uncorrectable Error", str(len(hits))),
        _row(2, "Inactive Uncorrectable Error", "0"),
        _row(2, "Pending", "Yes" if hits else "No"),
        _row(2, "Remapping Failure Occurred", "Yes" if 64 in hits else "No"),
    ]


def _memory(view: View, gpu: Gpu) -> list[str]:
    used = view.used_mib(gpu)
    return [
        _row(1, "FB Memory Usage"),
        _row(2, "Total", f"{gpu.memory_total_mib} MiB"),
        _row(2, "Reserved", f"{RESERVED_MIB} MiB"),
        _row(2, "Used", f"{used} MiB"),
        _row(2, "Free", f"{view.free_mib(gpu)} MiB"),
    ]


def _utilization(view: View, gpu: Gpu) -> list[str]:
    broken = gpu.fault == "reset"
    busy = "GPU requires reset" if broken else f"{view.busy_pct(gpu)} %"
    memory = "GPU requires reset" if broken else f"{view.busy_pct(gpu) // 2} %"
    return [_row(1, "Utilization"), _row(2, "GPU", busy), _row(2, "Memory", memory)]


def _temperature(view: View, gpu: Gpu) -> list[str]:
    value = "GPU requires reset" if gpu.fault == "reset" else f"{32 + view.busy_pct(gpu) // 3} C"
    return [_row(1, "Temperature"), _row(2, "GPU Current Temp", value)]


def _power(view: View, gpu: Gpu) -> list[str]:
    value = "GPU requires reset" if gpu.fault == "reset" else f"{77 + 6 * view.busy_pct(gpu):.2f} W"
    return [
        _row(1, "GPU Power Readings"),
        _row(2, "Average Power Draw", value),
        _row(2, "Current Power Limit", "700.00 W"),
    ]


def _compute(view: View, gpu: Gpu) -> list[str]:
    return [_row(1, "Compute Mode", "Default")]


def _pids(view: View, gpu: Gpu) -> list[str]:
    mine = [h for h in view.listed if h.index == gpu.index]
    if not mine:
        return [_row(1, "Processes", "None")]
    rows = [_row(1, "Processes")]
    for h in mine:
        cells = (
            (2, "GPU instance ID", "N/A"),
            (2, "Compute instance ID", "N/A"),
            (2, "Process ID", str(h.pid)),
            (3, "Type", "C"),
            (3, "Name", h.name),
            (3, "Used GPU Memory", f"{h.mib} MiB"),
        )
        rows += [_row(depth, key, value, width=42) for depth, key, value in cells]
    return rows


_WRITERS = {
    "MEMORY": _memory,
    "COMPUTE": _compute,
    "UTILIZATION": _utilization,
    "ECC": _ecc,
    "ROW_REMAPPER": _row_remapper,
    "TEMPERATURE": _temperature,
    "POWER": _power,
    "PIDS": _pids,
}


def _general(view: View, gpu: Gpu) -> list[str]:
    recovery = "Reset" if gpu.fault == "reset" or _RESET_XIDS & set(gpu.xid) else "None"
    return [
        _row(1, "Product Name", gpu.name),
        _row(1, "Product Brand", "NVIDIA"),
        _row(1, "Persistence Mode", "Enabled"),
        _row(1, "GPU UUID", gpu.uuid),
        _row(1, "Minor Number", str(gpu.index)),
        _row(1, "GPU Recovery Action", recovery),
        _row(1, "PCI"),
        _row(2, "Bus Id", gpu.bus),
        _row(2, "GPU Link Info"),
        _row(3, "PCIe Generation"),
        _row(4, "Max", gpu_cell(view, gpu, "pcie.link.gen.max")),
        _row(4, "Current", gpu_cell(view, gpu, "pcie.link.gen.current")),
        _row(3, "Link Width"),
        _row(4, "Max", f"{gpu_cell(view, gpu, 'pcie.link.width.max')}x"),
        _row(4, "Current", f"{gpu_cell(view, gpu, 'pcie.link.width.current')}x"),
    ]


def query(view: View, sections: tuple[str, ...]) -> str:
    """`-q`, all sections, or `-q -d A,B`, only those."""
    lines = [
        "",
        "==============NVSMI LOG==============",
        "",
        _row(0, "Timestamp", time.strftime("%a %b %e %H:%M:%S %Y")),
        _row(0, "Driver Version", view.box.driver_version),
        _row(0, "CUDA Version", view.box.cuda_version),
        "",
        _row(0, "Attached GPUs", str(len(view.numbers))),
    ]
    for gpu in view.gpus:
        lines.append(f"GPU {gpu.bus}")
        if not sections:
            lines += _general(view, gpu)
        for name, writer in _WRITERS.items():
            if not sections or name in sections:
                lines += writer(view, gpu)
        lines.append("")
    return "\n".join(lines) + "\n"


_HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: {cuda:<8} |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
"""
_PROCESSES = """\

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
"""


def summary(view: View) -> str:
    """`nvidia-smi` without arguments: the table that people look at."""
    text = time.strftime("%a %b %e %H:%M:%S %Y") + " " * 7 + "\n"
    text += _HEAD.format(driver=view.box.driver_version, cuda=view.box.cuda_version)
    for g in view.gpus:
        broken = g.fault == "reset"
        memory = f"{view.used_mib(g)}MiB / {g.memory_total_mib:>6}MiB"
        heat = "ERR!" if broken else gpu_cell(view, g, "temperature.gpu") + "C"
        watts = f"{77 + 6 * view.busy_pct(g)}W /  700W"
        busy = "ERR!" if broken else f"{view.busy_pct(g)}%"
        ecc = g.ecc_volatile_uncorrectable
        for left, middle, right in (
            (f" {view.numbers[g.uuid]:>3}  {g.name:<29}On ", f"   {g.bus} Off", f"{ecc:>21}"),
            (f" N/A  {heat:>4}    P0  {watts:>23}", f" {memory:>22}", f" {busy:>7} {'Default':>12}"),
            ("", "", f"{'Disabled':>21}"),
        ):
            text += f"|{left:<41}|{middle:<24}|{right:<22}|\n"
        text += "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+\n"
    text += _PROCESSES
    by_index = {g.index: view.numbers[g.uuid] for g in view.gpus}
    rows = [(by_index[h.index], h) for h in view.listed if h.index in by_index]
    for number, h in rows:
        row = f" {number:>4}   N/A  N/A {h.pid:>15} {'C':>6}   {h.name[:30]:<30} {h.mib:>12}MiB"
        text += f"|{row:<89}|\n"
    if not rows:
        text += f"|{'  No running processes found':<89}|\n"
    return text + "+" + "-" * 89 + "+\n"
