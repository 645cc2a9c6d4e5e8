"""Small programs that keep a run's files, and what they leave."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def program(folder: Path, body: str) -> list[str]:
    head = (
        "import sys, time, threading\nfrom pathlib import Path\n"
        "from trainer.process.runfiles import RunFiles\n"
        f"files = RunFiles(Path({str(folder)!r}))\nfiles.listen()\n"
    )
    return [sys.executable, "-c", head + body]
