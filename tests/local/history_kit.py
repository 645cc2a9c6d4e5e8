"""Folders of ended runs, as their supervisors left them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.config.hosts import Host
from dflashctl.remote.local import LocalEngine

ROOT = Path(__file__).parents[2]
SUMMARY = {
    "version": 1,
    "headline": "acceptance length 1.02 -> 2.44",
    "lossless": True,
    "best_acceptance_length": 2.44,
    "table": {
        "columns": ["figure", "before", "after"],
        "rows": [["greedy", "1.02", "2.44"], ["T=0.7", "1.01"]],
    },
    "notes": ["prompt lookup wins at \x1b[31m4 tokens"],
}


def kept_in(folder: Path) -> LocalEngine:
    """A host of engine `local` with all that it has in one folder."""
    state = str(folder)
    return LocalEngine(
        Host(
            name="here", engine="local", python=sys.executable, code_root=state, workdir=state, log_dir=state,
            state_dir=state,
        )
    )  # fmt: skip


def made(
    engine: LocalEngine, number: int, tag: str, *, files: dict[str, Any] | None = None, **record: Any
) -> Path:
    """The folder of a run that ended, as its supervisor left it."""
    at = 1.8e9 + number
    run_id = f"{time.strftime('%Y%m%dT%H%M%S000', time.gmtime(at))}-{number:06x}"
    folder = Path(engine.host.state_dir) / "runs" / run_id
    folder.mkdir(parents=True)
    body = {
        "version": 1, "id": folder.name, "tag": tag, "recipe": "demo", "created_at": at,
        "created_by": "ann@laptop", "release": "7f3a91c2" * 8, "git": {"commit": "1c9e4d0aa", "dirty": True},
        "command": ["python", "-m", "x"], "log": f"/nowhere/train_{tag}.log",
        "gpus": [{"index": 0, "uuid": "GPU-0"}], "boot_id": "b", "init_start": 1,
    }  # fmt: skip
    given = {
        "record.json": body | record,
        "supervisor.json": {"version": 1, "started_at": at, "boot_id": "b", "init_start": 1},
        "exit.json": {"version": 1, "cause": "exited", "code": 0, "ended_at": at + 252, "wall_s": 252.0},
    }
    for name, content in (given | (files or {})).items():
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder
