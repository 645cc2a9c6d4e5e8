"""Make a box of simulated GPUs in a folder.

Layout of `gpu_dir` (parents must be searchable by the containers' users):

    state.json       what the GPUs are and suffer (state.py)
    dev/nvidiaN      one plain file a GPU, bound as /dev/nvidiaN on the host and in each container; so is
    dev/nvidiactl rpc/             bound as /run/nvidia-lab on the host and in each container, writable
    rpc/control      where a client announces its call (fifo) rpc/uuids        "index uuid" lines for the
    start-up hook of a container's Python rpc/calls/       one folder a call, made by the client, gone when it
    is answered bin/nvidia-smi   the client: POSIX sh and coreutils, no Python; bound or copied as
    /usr/bin/nvidia-smi
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from dflashctl.lab.gpu.state import Box, Gpu, save

CLIENT = Path(__file__).with_name("nvidia-smi.sh")
HOOK_DIR = Path(__file__).with_name("hook")
"""Put this folder first on PYTHONPATH of a container's Python and it opens its GPUs as CUDA would."""

DEV_FILES_SHARED = ("nvidiactl",)
IDLE_MIB = {4: 4}
"""Idle baselines: real cards differ by a few MiB, so that "equals 0" must not be the rule for idle."""


def uuid_of(index: int) -> str:
    """A stable UUID in NVIDIA's form for simulated GPU `index`."""
    h = hashlib.sha256(f"dflashctl simulated GPU {index}".encode()).hexdigest()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:32]}"


def bus_of(index: int) -> str:
    """A PCI address in nvidia-smi's form (domain of eight digits), spread as on a two-socket server."""
    return f"00000000:{0x18 + 0x11 * index:02X}:00.0"


def device_files(gpu_dir: Path) -> list[Path]:
    """The files to bind into /dev, GPUs first."""
    return sorted(
        (gpu_dir / "dev").iterdir(), key=lambda p: (p.name in DEV_FILES_SHARED, len(p.name), p.name)
    )


def setup(gpu_dir: Path, count: int = 8) -> Box:
    """Create the folder's files for `count` healthy GPUs and return their state. Safe to call on an existing
    box: device files keep their inodes (they are how holders are found); the state starts afresh."""
    dev, rpc, calls, bin_dir = (gpu_dir / name for name in ("dev", "rpc", "rpc/calls", "bin"))
    for folder in (gpu_dir, dev, rpc, calls, bin_dir):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    # A container's root may be any uid of the host: it must be able to make its call's folder here.
    calls.chmod(0o1777)
    for leftover in calls.iterdir():
        shutil.rmtree(leftover, ignore_errors=True)
    for name in (*(f"nvidia{n}" for n in range(count)), *DEV_FILES_SHARED):
        path = dev / name
        path.touch()
        path.chmod(0o666)
    control = rpc / "control"
    if not control.exists():
        os.mkfifo(control)
    control.chmod(0o622)
    # A copy, not a link: the package may lie below a folder that a container's user cannot search.
    client = bin_dir / "nvidia-smi"
    shutil.copyfile(CLIENT, client)
    client.chmod(0o755)
    box = Box(
        gpus=[Gpu(index=n, uuid=uuid_of(n), bus=bus_of(n), idle_mib=IDLE_MIB.get(n, 0)) for n in range(count)]
    )
    save(gpu_dir, box)
    (rpc / "uuids").write_text("".join(f"{g.index} {g.uuid}\n" for g in box.gpus))
    return box
