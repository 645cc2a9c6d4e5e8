"""nvidia-smi's command line, as a function: arguments and what the driver knows in, text and exit code out.

Errors are part of the answer: the real tool prints them on stdout. Texts and codes are as observed on two
H200s with driver 580, and for faults that nobody can order as published logs show them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
    format: str = "csv"
    ids: list[str] | None = None
    sections: tuple[str, ...] = ()


_NOT_HERE = "ERROR: Option {} is not valid for this command. Please run 'nvidia-smi -h' for help.\n\n"
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n"
)
_NO_LIBRARY = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. "
    "Please make sure that the NVIDIA Display Driver is properly installed and present in your system.\n"
    "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n"
)


def mode_answer(box: Box) -> Answer | None:
    """The answer of a driver that cannot work at all; None in mode ok."""
    cannot = "Failed to initialize NVML: "
    answers = {
        "unknown": Answer(255, cannot + "Unknown Error\n"),
        "nodriver": Answer(9, _NO_DRIVER),
        "nolib": Answer(12, _NO_LIBRARY),
        "mismatch": Answer(
            18, f"{cannot}Driver/library version mismatch\nNVML library version: {box.library_version}\n"
        ),
        "nodevices": Answer(6, "No devices were found\n"),
        "blocked": Answer(17, cannot + "GPU access blocked by the operating system\n"),
        "hang": Answer(0, hang=True),
    }
    return answers.get(box.mode)


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
        kind = _WITH_VALUE.get(name)
        if kind is not None:
            if not equals:
                if not rest:
                    raise _Stop(
                        2, f"Option {word} is missing its value.  Please run 'nvidia-smi -h' for help.\n"
                    )
                value = rest.pop(0)
            if kind == "id":
                call.ids = value.split(",")
            elif kind == "format":
                call.format = value
            elif kind == "display":
                call.sections = tuple(part.strip().upper() for part in value.split(","))
            elif call.action == "list":
                raise _Stop(2, _NOT_HERE.format(word))
            else:
                call.action, call.columns = kind, [c.strip() for c in value.split(",")]
        elif word in ("-L", "--list-gpus"):
            call.action = "list"
        elif word in ("-q", "--query"):
            call.action = "query"
        else:
            raise _Stop(255, f"ERROR: Option {word} is not recognized. Please run 'nvidia-smi -h'.\n\n")
    if call.action == "list" and call.ids is not None:
        raise _Stop(2, _NOT_HERE.format("-i"))
    if any(section not in report.SECTIONS for section in call.sections):
        raise _Stop(2, "Failed to parse --display/-d flags\n")
    return call


def _choose(call: _Call, view: View) -> list[Gpu]:
    """The GPUs that -i names; names of none are passed over, as the real tool does while one is found."""

    def named(gpu: Gpu) -> bool:
        wanted = call.ids or []
        return (
            str(view.numbers[gpu.uuid]) in wanted
            or gpu.uuid in wanted
            or any(":" in w and gpu.bus.endswith(w.upper()) for w in wanted)
        )

    chosen = [g for g in view.gpus if call.ids is None or named(g)]
    if not chosen:
        raise _Stop(6, "No devices were found\n")
    return chosen


def _split_lost(view: View, gpus: list[Gpu]) -> tuple[list[Gpu], str, int]:
    """GPUs that answer, the error lines of those that do not, and the exit code that these cause."""
    lines, code = [], 0
    for gpu in gpus:
        bus = re.sub(r"^0000(?=[0-9A-F]{4}:)", "", gpu.bus)
        head = f"Unable to determine the device handle for GPU{view.numbers[gpu.uuid]}: {bus}: "
        if gpu.fault == "lost":
            lines.append(head + "GPU is lost.  Reboot the system to recover this GPU\n")
            code = 15
        elif gpu.fault == "handle":
            lines.append(head + "Unknown Error\n")
            code = 255
    return [g for g in gpus if g.fault not in ("lost", "handle")], "".join(lines), code


def _table(columns: list[str], known: dict[str, tuple[str, str]], format: str, rows: list[list[str]]) -> str:
    """CSV as nvidia-smi prints it. `known` maps a column to its header and unit; rows hold bare values."""
    words = [w.strip() for w in format.split(",")]
    if any(word not in ("csv", "noheader", "nounits") for word in words):
        raise _Stop(2, "Format modifier is not recognized.\n")
    units = "nounits" not in words
    text = ""
    if "noheader" not in words:
        heads = [known[c] for c in columns]
        text = ", ".join(f"{name} [{unit}]" if unit and units else name for name, unit in heads) + "\n"
    for row in rows:
        cells = []
        for column, value in zip(columns, row, strict=True):
            unit = known[column][1] if units and not value.startswith("[") else ""
            cells.append(f"{value} {unit}" if unit else value)
        text += ", ".join(cells) + "\n"
    return text


def _check_columns(columns: list[str], known: dict[str, tuple[str, str]]) -> None:
    for name in columns:
        if name not in known:
            raise _Stop(2, f'Field "{name}" is not a valid field to query.\n\n')


def _query_gpu(call: _Call, view: View) -> str:
    known = {name: (f.header, f.unit) for name, f in GPU_FIELDS.items()}
    _check_columns(call.columns, known)
    rows = [[gpu_cell(view, gpu, name) for name in call.columns] for gpu in view.gpus]
    return _table(call.columns, known, call.format, rows)


def _query_apps(call: _Call, view: View) -> str:
    known = {name: (f.header, f.unit) for name, f in APP_FIELDS.items()}
    _check_columns(call.columns, known)
    by_index = {g.index: g for g in view.gpus}
    rows = [
        [APP_FIELDS[name].value(view, by_index[h.index], h) for name in call.columns]
        for h in view.listed
        if h.index in by_index
    ]
    return _table(call.columns, known, call.format, rows)


def _list(call: _Call, view: View) -> str:
    return "".join(f"GPU {view.numbers[g.uuid]}: {g.name} (UUID: {g.uuid})\n" for g in view.gpus)


_ACTIONS: dict[str, Callable[[_Call, View], str]] = {
    "gpu": _query_gpu,
    "apps": _query_apps,
    "list": _list,
    "topo": lambda call, view: report.topology(view),
    "query": lambda call, view: report.query(view, call.sections),
    "summary": lambda call, view: report.summary(view),
}


def needs_utilization(argv: Sequence[str]) -> bool:
    """Whether the answer may show figures that take a moment to measure."""
    words = ("utilization", "power", "temperature", "clocks")
    return not argv or "-q" in argv or "--query" in argv or any(w in a for a in argv for w in words)


def answer(argv: Sequence[str], view: View) -> Answer:
    """The whole call, for a caller that sees `view`."""
    broken = mode_answer(view.box)
    if broken is not None:
        return broken
    try:
        call = _parse(argv)
        alive, errors, code = _split_lost(view, _choose(call, view))
        text = _ACTIONS[call.action](call, replace(view, gpus=tuple(alive)))
    except _Stop as stop:
        return stop.answer
    return Answer(code, errors + text)
