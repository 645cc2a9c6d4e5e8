"""`nvidia-smi -q` and `nvidia-smi topo -m` as data. Pure.

-q is a tree of `key : value` lines, indented by four; keys repeat under different parents, so a value is
found by its whole path. Layout as printed by driver 580.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflashctl.gpus import smi

INDENT = 4
GPU = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
Path = tuple[str, ...]


@dataclass(frozen=True)
class GpuReport:
    """One GPU of -q. `bus` as printed; values by path: ("ECC Mode", "Current") -> "Enabled"."""

    bus: str
    values: Mapping[Path, str] = field(default_factory=dict)

    def get(self, *path: str) -> str:
        """ "" when -q does not show it, or has nothing to say there."""
        found = self.values.get(path, "")
        return "" if found in ("N/A", "[N/A]") else found

    def below(self, *path: str) -> dict[str, str]:
        """All values of a section, by the rest of their path joined by a blank."""
        return {
            " ".join(each[len(path) :]): value
            for each, value in self.values.items()
            if each[: len(path)] == path
        }

    @property
    def uuid(self) -> str:
        return self.get("GPU UUID")

    @property
    def name(self) -> str:
        """How messages name it: its number if -q tells it, else its bus."""
        number = self.get("Minor Number")
        return f"GPU {number}" if number.isdecimal() else f"GPU {self.bus}"


@dataclass(frozen=True)
class Query:
    """All of -q. `problem`: nothing could be read, and why; `complaints`: lines about single GPUs."""

    gpus: tuple[GpuReport, ...] = ()
    driver: str = ""
    cuda: str = ""
    problem: str = ""
    complaints: tuple[str, ...] = ()


def parse_query(reading: Mapping[str, Any]) -> Query:
    """From a reading {"exit", "stdout", "stderr", "problem"}."""
    if not reading:
        return Query(problem="nvidia-smi was not asked")
    head: dict[Path, str] = {}
    gpus: list[GpuReport] = []
    complaints = []
    values, path = head, list[str]()
    for raw in str(reading.get("stdout") or "").splitlines():
        line = raw.rstrip()
        if match := GPU.fullmatch(line):
            values, path = {}, []
            gpus.append(GpuReport(match[1], values))
            continue
        if smi.LOST.search(line):
            complaints.append(line.strip())
            continue
        key, colon, value = line.partition(" : ") if " : " in line else line.rpartition(": ")
        if not line.strip() or line.startswith("="):
            continue
        if not colon:
            key, value = line, ""
        depth = (len(key) - len(key.lstrip(" "))) // INDENT - (values is not head)
        path = [*path[: max(depth, 0)], key.strip()]
        if colon:
            values[tuple(path)] = value.strip()
    found = tuple(gpu for gpu in gpus if gpu.values)
    if not found or (reading.get("exit") not in (0, smi.WARNED) and not complaints):
        return Query(problem=smi.failure(reading, "nvidia-smi -q says nothing"), complaints=tuple(complaints))
    return Query(
        gpus=found,
        driver=head.get(("Driver Version",), ""),
        cuda=head.get(("CUDA Version",), ""),
        complaints=tuple(complaints),
    )


def parse_topology(reading: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """(i, j), i < j -> "NV18", "PIX", "SYS" ...; empty where there is no matrix."""
    lines = [ANSI.sub("", line) for line in str(reading.get("stdout") or "").splitlines()]
    header = next((line.split() for line in lines if re.match(r"\s+GPU0\b", line)), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    found = {}
    for line in lines:
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]) or len(words) <= len(columns):
            continue
        one = int(words[0][3:])
        for column, cell in zip(columns, words[1:], strict=False):
            other = int(column[3:])
            if one < other:
                found[one, other] = cell
    return found
