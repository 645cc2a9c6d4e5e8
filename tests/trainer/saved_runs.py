"""Runs that leave checkpoints, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.checkpoint import files as checkpoint
from trainer.process.runfiles import RunFiles
from trainer.run.train import run


def train(made: dict[str, Any], folder: Path, resume: Path | None = None, allow: bool = False) -> list[str]:
    said: list[str] = []
    run(configs.load(made), RunFiles(folder), said.append, None, resume, allow)
    return said


def losses(folder: Path) -> dict[int, float]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def at(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / checkpoint.folder_name(step)


def harm(folder: Path) -> None:
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
