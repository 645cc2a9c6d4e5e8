"""What a run's checkpoints/ holds, without reading a weight."""

from __future__ import annotations

import os
from typing import Any, Dict, List

from ..records.runfolder import RunFolder

MOST = 100


def checkpoints(run: RunFolder) -> Dict[str, Any]:
    """{"folders": [{"name", "bytes"}], "best": where that link points, or null}. By name, the last
    MOST. What is being written is a hidden folder, and none yet."""
    root = run.file("checkpoints")
    try:
        names = sorted(name for name in os.listdir(root) if not name.startswith("."))
    except OSError:
        names = []
    folders: List[Dict[str, Any]] = []
    best = None
    for name in names:
        path = os.path.join(root, name)
        try:
            if os.path.islink(path):
                best = os.readlink(path) if name == "best" else best
            elif os.path.isdir(path):
                folders.append({"name": name, "bytes": _bytes(path)})
        except OSError:
            continue  # pruned meanwhile
    return {"folders": folders[-MOST:], "best": best}


def _bytes(root: str) -> int:
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
