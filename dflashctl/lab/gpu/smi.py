"""nvidia-smi's command line, as a function: arguments and what the driver knows in, text and exit code out.

Errors are part of the answer: the real tool prints them on stdout. Texts and codes as observed on driver 580
or as published logs show them for faults that nobody can order."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dflashctl.lab.gpu import report
from dflashctl.lab.gpu.fields import APP_FIELDS, GPU_FIELDS, View, gpu_cell
from dflashctl.lab.gpu.state import Box, Gpu


@dataclass(frozen=True)
class Answer:
    """What the client prints on stdout, and its exit code; `hang`: it gets neither."""

    code: int
    text: str = ""
    hang: bool = False


class _Stop(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.answer = Answer(code, text)


@dataclass
class _Call:
    action: str = "summary"
    columns: list[str] = field(default_factory=list)
    format: str | None = None
    ids: list[str] | None = None
    sections: tuple[str, ...] = ()


def mode_answer(box: Box) -> Answer | None:
    """The answer of a driver that cannot work at all; None in mode ok."""
    texts = {
        "unknown": (255, "Failed to initialize NVML: Unknown Error\n"),
        "nodriver": (
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure "
            "that the latest NVIDIA driver is installed and running.\n\n",
        ),
        "nolib": (
            12,
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the "
            "NVIDIA Display Driver is properly installed and present in your system.\nPlease also try adding "
            "directory that contains libnvidia-ml.so to your system PATH.\n",
        ),
        "mismatch": (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\n"
            f"NVML library version: {box.library_version}\n",
        ),
        "nodevices": (6, "No devices were found\n"),
        "blocked": (17, "Failed to initialize NVML: GPU access blocked by the operating system\n"),
    }
    if box.mode == "hang":
        return Answer(0, hang=True)
    return Answer(*texts[box.mode]) if box.mode in texts else None


_WITH_VALUE = {
    "-i": "id",
    "--id": "id",
    "--format": "format",
    "-d": "display",
    "--display": "display",
    "--query-gpu": "gpu",
    "--query-compute-apps": "apps",
}


def _parse(argv: Sequence[str]) -> _Call:
    call, rest = _Call(), list(argv)
    if rest[:1] == ["topo"]:
        if rest[1:] in (["-m"], ["--matrix"]):
            return _Call("topo")
        raise _Stop(2, 'ERROR: only "topo -m" is simulated.\n')
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _WITH_VALUE:
            if not equals:
                if not rest:
                    raise _Stop(
                        2, f"Option {word} is missing its value.  Please run 'nvidia-smi -h' for help.\n"
                    )
                value = rest.pop(0)
            kind = _WITH_VALUE[name]
            if kind == "id":
                call.ids = value.split(",")
            elif kind == "format":
                call.format = value
            elif kind == "display":
                call.sections = tuple(part.strip().upper() for part in value.split(","))
            else:
                call.action, call.columns = kind, [c.strip() for c in value.split(",")]
        elif word in ("-L", "--list-gpus"):
            call.action = "list"
        elif word in ("-q", "--query"):
            call.action = "query"
        else:
            raise _Stop(
                2,
                f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\n"
                f"Option '{word}' is unknown or not simulated.\n",
            )
    return call


def _format(call: _Call) -> tuple[bool, bool]:
    """(header, units)."""
    words = [] if call.format is None else [w.strip() for w in call.format.split(",")]
    if "csv" not in words:
        raise _Stop(2, '"--format=" switch is missing. Refer to "nvidia-smi --help-query-gpu" for details.\n')
    for word in words:
        if word not in ("csv", "noheader", "nounits"):
            raise _Stop(2, f'Format "{word}" is not a valid format.\n')
    return "noheader" not in words, "nounits" not in words


def _choose(call: _Call, view: View) -> list[Gpu]:
    if call.ids is None:
        return list(view.gpus)
    chosen = []
    for wanted in call.ids:
        matches = [
            g
            for g in view.gpus
            if wanted in (str(g.index), g.uuid) or (":" in wanted and g.bus.endswith(wanted.upper()))
        ]
        if not matches:
            raise _Stop(6, "No devices were found\n")
        chosen += [g for g in matches if g not in chosen]
    return sorted(chosen, key=lambda g: g.index)


def _split_lost(gpus: list[Gpu]) -> tuple[list[Gpu], str, int]:
    """GPUs that answer, the error lines of those that do not, and the exit code that these cause."""
    lines, code = [], 0
    for gpu in gpus:
        bus = re.sub(r"^0000(?=[0-9A-F]{4}:)", "", gpu.bus)
        head = f"Unable to determine the device handle for GPU{gpu.index}: {bus}: "
        if gpu.fault == "lost":
            lines.append(head + "GPU is lost.  Reboot the system to recover this GPU\n")
            code = 15
        elif gpu.fault == "handle":
            lines.append(head + "Unknown Error\n")
            code = 255
    return [g for g in gpus if g.fault not in ("lost", "handle")], "".join(lines), code


def _cell(value: str, unit: str, units: bool) -> str:
    return f"{value} {unit}" if unit and units and not value.startswith("[") else value


def _header(fields: Sequence[tuple[str, str]], units: bool) -> str:
    return ", ".join(f"{name} [{unit}]" if unit and units else name for name, unit in fields) + "\n"


def _query_gpu(call: _Call, view: View, gpus: list[Gpu]) -> str:
    for name in call.columns:
        if name not in GPU_FIELDS:
            raise _Stop(2, f'Field "{name}" is not a valid field to query.\n\n')
    header, units = _format(call)
    fields = [GPU_FIELDS[name] for name in call.columns]
    text = _header([(f.header, f.unit) for f in fields], units) if header else ""
    for gpu in gpus:
        cells = [_cell(gpu_cell(view, gpu, name), GPU_FIELDS[name].unit, units) for name in call.columns]
        text += ", ".join(cells) + "\n"
    return text


def _query_apps(call: _Call, view: View, gpus: list[Gpu]) -> str:
    for name in call.columns:
        if name not in APP_FIELDS:
            raise _Stop(2, f'Field "{name}" is not a valid field to query.\n\n')
    header, units = _format(call)
    fields = [APP_FIELDS[name] for name in call.columns]
    text = _header([(f.header, f.unit) for f in fields], units) if header else ""
    by_index = {g.index: g for g in gpus}
    for holder in view.listed:
        gpu = by_index.get(holder.index)
        if gpu is not None:
            cells = [_cell(f.value(view, gpu, holder), f.unit, units) for f in fields]
            text += ", ".join(cells) + "\n"
    return text


def _list(view: View, gpus: list[Gpu], call: _Call) -> str:
    if call.ids is not None and any(i.startswith("GPU-") for i in call.ids):
        raise _Stop(
            2, "ERROR: Option -i is not valid for this command. Please run 'nvidia-smi -h' for help.\n"
        )
    return "".join(f"GPU {g.index}: {g.name} (UUID: {g.uuid})\n" for g in gpus)


def _summary(view: View, gpus: list[Gpu]) -> str:
    text = time.strftime("%a %b %e %H:%M:%S %Y") + "\n"
    text += f"NVIDIA-SMI {view.box.driver_version}  CUDA Version: {view.box.cuda_version}  (simulated GPUs)\n"
    for g in gpus:
        busy = gpu_cell(view, g, "utilization.gpu")
        memory = f"{view.used_mib(g):>8}MiB / {g.memory_total_mib}MiB"
        text += f"{g.index:>4}  {g.name:<20} {g.bus}  {memory}  {busy:>4}%\n"
    return text


def needs_utilization(argv: Sequence[str]) -> bool:
    """Whether the answer shows figures that take a moment to measure."""
    words = ("utilization", "power", "temperature", "clocks", "-q", "--query")
    return not argv or any(w in a for a in argv for w in words[:4]) or any(a in words[4:] for a in argv)


def answer(argv: Sequence[str], view: View) -> Answer:
    """The whole call, for a caller that sees `view`."""
    broken = mode_answer(view.box)
    if broken is not None:
        return broken
    try:
        call = _parse(argv)
        bad = [s for s in call.sections if s not in report.SECTIONS]
        if bad:
            raise _Stop(2, "Failed to parse --display/-d flags\n")
        if call.action == "list" and call.ids is not None:
            _list(view, [], call)
        gpus = _choose(call, view)
    except _Stop as stop:
        return stop.answer
    if not gpus:
        return Answer(6, "No devices were found\n")
    alive, errors, code = _split_lost(gpus)
    shown = replace(view, gpus=tuple(alive))
    try:
        if call.action == "gpu":
            text = _query_gpu(call, shown, alive)
        elif call.action == "apps":
            text = _query_apps(call, shown, alive)
        elif call.action == "list":
            text = _list(shown, alive, call)
        elif call.action == "topo":
            text = report.topology(shown)
        elif call.action == "query":
            text = report.query(shown, call.sections)
        else:
            text = _summary(shown, alive)
    except _Stop as stop:
        return stop.answer
    return Answer(code, errors + text)
