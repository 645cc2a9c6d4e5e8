"""What the simulated GPUs are and what is wrong with them: one JSON file, replaced atomically, read at each
request.

A test injects a fault by changing the file; the next answer of `nvidia-smi`, on the host or in any container,
shows it. Unknown keys are refused, so that a misspelt fault cannot pass for a healthy GPU."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

MODES = ("ok", "unknown", "nodriver", "nolib", "mismatch", "nodevices", "blocked", "hang")
"""What a whole `nvidia-smi` call meets; anything but `ok` prints its error on stdout and answers nothing
else."""

MODE_AT = ("everywhere", "host", "container")
"""Who meets the mode: a container can lose its GPU access while the host's view is fine."""

FAULTS = ("none", "missing", "reset", "lost", "handle")
"""What one GPU may suffer: left out of every list, so that those after it move up one index (as observed);
needs a reset (its memory looks free); lost; handle unknown."""


@dataclass
class Gpu:
    """One simulated GPU. Memory in MiB; `fields` overrides single cells of --query-gpu by field name."""

    index: int
    uuid: str
    bus: str
    name: str = "NVIDIA H200"
    memory_total_mib: int = 143771
    idle_mib: int = 0
    leaked_mib: int = 0
    """Memory held with no process to name, as after a context that the driver never took down."""
    fault: str = "none"
    utilization_pct: int | None = None
    """None: measured from the holders' CPU time."""
    ecc_volatile_uncorrectable: int = 0
    ecc_aggregate_uncorrectable: int = 0
    xid: list[int] = field(default_factory=list)
    """Xid errors that the driver logged for this GPU; shown by -q where that is a consequence (see
    report.py)."""
    fields: dict[str, str] = field(default_factory=dict)


@dataclass
class Box:
    """All GPUs of one machine, and the driver's mood. `version` is the format's."""

    gpus: list[Gpu]
    version: int = 1
    mode: str = "ok"
    mode_at: str = "everywhere"
    driver_version: str = "580.159.04"
    library_version: str = "580.159"
    cuda_version: str = "13.0"
    default_mib: int = 518
    """What a holder takes that declares nothing: a bare CUDA context on an H200."""
    linger_s: float = 0.0
    """How long memory stays taken after its process died without closing the device."""
    answer_delay_s: float = 0.0
    container_apps: str = "host-pids"
    """`host-pids`: a container sees the holders with the host's pids. `hidden`: it sees none. Both have been
    observed with driver 580."""

    def gpu(self, index: int) -> Gpu:
        """The GPU with this index; KeyError if there is none."""
        for gpu in self.gpus:
            if gpu.index == index:
                return gpu
        raise KeyError(f"no simulated GPU {index}")


def _strict(kind: type, data: dict[str, Any], where: str) -> dict[str, Any]:
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return data


def parse(text: str) -> Box:
    """state.json to a Box. ValueError names what is wrong."""
    data = json.loads(text)
    if data.get("version") != 1:
        raise ValueError(f"version {data.get('version')!r} of the GPU state is not known")
    gpus = [Gpu(**_strict(Gpu, g, f"gpus[{n}]")) for n, g in enumerate(data.get("gpus", []))]
    box = Box(**{**_strict(Box, data, "state"), "gpus": gpus})
    for value, allowed, what in (
        (box.mode, MODES, "mode"),
        (box.mode_at, MODE_AT, "mode_at"),
        (box.container_apps, ("host-pids", "hidden"), "container_apps"),
        *((g.fault, FAULTS, f"fault of GPU {g.index}") for g in gpus),
    ):
        if value not in allowed:
            raise ValueError(f"{what}: {value!r} is none of {', '.join(allowed)}")
    return box


def load(gpu_dir: Path) -> Box:
    """The state of the box in gpu_dir."""
    return parse((gpu_dir / "state.json").read_text())


def save(gpu_dir: Path, box: Box) -> None:
    """Replace the state atomically: a request sees the old or the new one, never half."""
    text = json.dumps(asdict(box), indent=1) + "\n"
    parse(text)
    fd, name = tempfile.mkstemp(prefix=".state.", dir=gpu_dir)
    with os.fdopen(fd, "w") as f:
        os.fchmod(fd, 0o644)
        f.write(text)
    Path(name).replace(gpu_dir / "state.json")


def change(gpu_dir: Path, how: Callable[[Box], None]) -> Box:
    """Read, let `how` change the Box in place, write. For one writer at a time."""
    box = load(gpu_dir)
    how(box)
    save(gpu_dir, box)
    return box
