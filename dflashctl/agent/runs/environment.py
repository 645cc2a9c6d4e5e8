"""What a run runs on: its Python, the packages installed there, the GPU driver (`environment.json`)."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Dict, Optional

DRIVER_FILE = "/proc/driver/nvidia/version"
_INSTALLED = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def environment() -> Dict[str, Any]:
    """{"python", "executable", "packages": {name: version}, "driver"|null, "kernel", "cpus", "memory_bytes"}.

    Of the Python that this runs in, which is the one of the host's entry. Packages are known by the names of
    their metadata folders, so this takes milliseconds where reading the metadata would take seconds.
    """
    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "packages": packages(),
        "driver": driver(),
        "kernel": os.uname().release,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def packages() -> Dict[str, str]:
    """Name (as PyPI normalises it) -> version; the first on the path counts, as for an import."""
    found: Dict[str, str] = {}
    for folder in sys.path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in names:
            match = _INSTALLED.fullmatch(name)
            if match:
                found.setdefault(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
    return found


def driver() -> Optional[str]:
    """Of the loaded kernel module: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06`."""
    try:
        with open(DRIVER_FILE, errors="replace") as file:
            found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", file.readline())
    except OSError:
        return None
    return found[1] if found else None
