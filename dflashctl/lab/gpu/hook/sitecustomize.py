"""Start-up hook of a container's Python (this folder first on PYTHONPATH): take the GPUs that CUDA would
take.

Opens /dev/nvidiaN for each entry of CUDA_VISIBLE_DEVICES (an index, or a GPU's uuid or a unique beginning of
one, up to the first invalid entry, as CUDA reads it) and keeps it open for the life of the process. Unset or
empty: none, so that a plain Python holds nothing. The descriptors are close-on-exec: a child that is no
Python holds nothing, one that is Python runs this hook itself. DFLASH_LAB_GPU_MIB declares the memory. Any
failure is silent: a start-up hook must never break the program that it starts in."""

from __future__ import annotations

import os


def _uuids(lab: str) -> dict[str, int]:
    """uuid -> index, from the list that the driver keeps beside its control fifo."""
    found = {}
    try:
        with open(lab + "/uuids") as f:
            for line in f:
                index, uuid = line.split()
                found[uuid] = int(index)
    except (OSError, ValueError):
        pass
    return found


def _wanted(text: str, lab: str) -> list[int]:
    uuids = _uuids(lab) if "GPU-" in text else {}
    chosen: list[int] = []
    for entry in text.split(","):
        entry = entry.strip()
        if entry.isdigit():
            index = int(entry)
        elif entry.startswith("GPU-"):
            matches = [i for u, i in uuids.items() if u.startswith(entry)]
            if len(matches) != 1:
                break
            index = matches[0]
        else:
            break
        if index in chosen:
            return []
        chosen.append(index)
    return chosen


def _open_gpus() -> list[int]:
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not text:
        return []
    dev = os.environ.get("NVIDIA_LAB_DEV", "/dev")
    mib = os.environ.get("DFLASH_LAB_GPU_MIB", "")
    held = []
    for index in _wanted(text, os.environ.get("NVIDIA_LAB_RPC", "/run/nvidia-lab")):
        try:
            fd = os.open(f"{dev}/nvidia{index}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        if mib.isdigit():
            os.lseek(fd, int(mib) << 20, os.SEEK_SET)
        held.append(fd)
    return held


try:
    _held = _open_gpus()
except Exception:
    _held = []
