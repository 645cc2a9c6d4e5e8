"""Who holds which simulated GPU: every process that has its device file open, as /proc tells it.

Nothing here is told by dflashctl. The scan sees the processes of the driver's pid namespace and of all
namespaces below it, so run the driver on the host: its pids are then the host's, also for processes in
containers.

A holder's memory on a GPU is, first that applies: the file offset of its open device in bytes (`os.lseek(fd,
mib << 20, os.SEEK_SET)`: works across namespaces, for a process that has no environment left, and dies with
it); DFLASH_LAB_GPU_MIB in its environment; the box's default."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Holder:
    """One process on one GPU. `pid` is the driver's (host's) view; `start` its start time in ticks since
    boot."""

    pid: int
    start: int
    index: int
    mib: int
    name: str
    utilization_pct: int | None
    """What it declared by DFLASH_LAB_GPU_UTIL; None: measure its CPU time."""


def device_ids(dev_dir: Path) -> dict[tuple[int, int], int]:
    """(device, inode) of each GPU's file -> GPU index."""
    found = {}
    for path in dev_dir.iterdir():
        number = path.name.removeprefix("nvidia")
        if number.isdigit():
            s = path.stat()
            found[(s.st_dev, s.st_ino)] = int(number)
    return found


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.split(b"=", 1) for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(k): os.fsdecode(v) for k, v in pairs}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def process_name(pid: int) -> str:
    """argv[0] as the process shows it now, else its comm: what the driver reports, renamed workers
    included."""
    try:
        argv0 = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0", 1)[0]
        if argv0:
            return os.fsdecode(argv0)
        return os.fsdecode((_PROC / str(pid) / "comm").read_bytes().rstrip(b"\n"))
    except OSError:
        return "[Not Found]"


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when there is no such process, or only its zombie."""
    try:
        rest = (_PROC / str(pid) / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if rest[0] in "ZX" else int(rest[19])


def _open_devices(pid: int, ids: dict[tuple[int, int], int]) -> dict[int, int]:
    """GPU index -> largest file offset (bytes) among this process's open descriptors of it."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return {}
    held: dict[int, int] = {}
    for name in names:
        try:
            # The link's text first: it costs nothing, and a stat may hang on a dead network file system.
            if not os.path.basename(os.readlink(f"{folder}/{name}")).startswith("nvidia"):  # noqa: PTH115, PTH119
                continue
            s = os.stat(f"{folder}/{name}")  # noqa: PTH116
            index = ids.get((s.st_dev, s.st_ino))
            if index is None:
                continue
            first = Path(f"/proc/{pid}/fdinfo/{name}").read_text().split("\n", 1)[0]
            held[index] = max(held.get(index, 0), int(first.split(":")[1]))
        except (OSError, ValueError, IndexError):
            continue  # it closed the file, or ended, between two of our looks
    return held


def scan(dev_dir: Path, default_mib: int, skip: frozenset[int] = frozenset()) -> list[Holder]:
    """All holders now, ordered by GPU, then pid. `skip` are pids that never count (the driver itself)."""
    ids = device_ids(dev_dir)
    holders = []
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if not entry.isdigit() or int(entry) in skip:
            continue
        pid = int(entry)
        held = _open_devices(pid, ids)
        start = start_ticks(pid) if held else None
        if start is None:
            continue
        env = _environment(pid)
        declared = _number(env.get("DFLASH_LAB_GPU_MIB"))
        for index, offset in held.items():
            mib = offset >> 20 or (default_mib if declared is None else declared)
            holders.append(
                Holder(pid, start, index, mib, process_name(pid), _number(env.get("DFLASH_LAB_GPU_UTIL")))
            )
    return sorted(holders, key=lambda h: (h.index, h.pid))


def _cpu_seconds(pid: int) -> float:
    try:
        rest = (_PROC / str(pid) / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(rest[11]) + int(rest[12])) / _TICKS_PER_S


def utilization(holders: list[Holder], sample_s: float = 0.15) -> dict[int, int]:
    """GPU index -> percent: the sum of what its holders declared, or burned of one CPU during the sample, at
    most 100. Waits sample_s only if a holder must be measured."""
    measured = {h.pid for h in holders if h.utilization_pct is None}
    before = {pid: _cpu_seconds(pid) for pid in measured}
    began = time.monotonic()
    if measured:
        time.sleep(sample_s)
    took = max(time.monotonic() - began, 1e-3)
    burned = {pid: 100 * max(0.0, _cpu_seconds(pid) - before[pid]) / took for pid in measured}
    total: dict[int, float] = {}
    for h in holders:
        share = burned[h.pid] if h.utilization_pct is None else h.utilization_pct
        total[h.index] = total.get(h.index, 0.0) + share
    return {index: min(100, round(value)) for index, value in total.items()}


class Lingering:
    """Memory that outlives a killed process, as a driver takes its time to tear a context down.

    A process that closed its device releases at once; one that is gone while it held is remembered for
    linger_s."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int, int], Holder] = {}
        self._left: list[tuple[float, Holder]] = []

    def update(self, holders: list[Holder], linger_s: float, now: float) -> dict[int, int]:
        """Take note of the holders at monotonic time `now`; returns GPU index -> lingering MiB."""
        current = {(h.pid, h.start, h.index): h for h in holders}
        if linger_s > 0:
            for key, holder in self._seen.items():
                if key not in current and start_ticks(holder.pid) != holder.start:
                    self._left.append((now + linger_s, holder))
        self._seen = current
        self._left = [(until, h) for until, h in self._left if until > now] if linger_s > 0 else []
        mib: dict[int, int] = {}
        for _, holder in self._left:
            mib[holder.index] = mib.get(holder.index, 0) + holder.mib
        return mib
