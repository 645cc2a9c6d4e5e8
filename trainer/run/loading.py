"""How long a run may take to load what it needs, which is one silent call: by the size of the weights."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import ConfigError
from trainer.model.random_target import RANDOM
from trainer.model.target_files import find_target
from trainer.process.pace import DEADLINE_S
from trainer.sections import TrainConfig

START_S = 300.0
"""For importing torch on a busy machine, to meet other ranks, and for a small model."""
SLOWEST_BYTES_S = 20 * 2**20
"""A slow network's rate: what reads slower than this is taken for hung."""


def loading_deadline_s(config: TrainConfig) -> float:
    """How old a heartbeat may become while the target is loaded. Weights that are drawn have no size yet."""
    if config.target.weights == RANDOM:
        return DEADLINE_S["loading"]
    try:
        folder = find_target(config.target.path)
    except ConfigError:  # told by whoever needs it
        return START_S
    return START_S + weight_bytes(folder) / SLOWEST_BYTES_S


def weight_bytes(folder: Path) -> int:
    """Of a target's safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
