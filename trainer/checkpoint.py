"""Checkpoints: a folder in the published drafter format, plus what training needs to go on.

`config.json` and `model.safetensors` are a complete drafter (float32); `trainer.json` says how it came about;
`optimizer.pt` holds the moments. A folder appears under its name only when it is complete and on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.errors import ConfigError, TrainerError
from trainer.model.drafter import Drafter
from trainer.model.drafter_config import DrafterConfig, from_json
from trainer.optim import DrafterOptimizer
from trainer.runfiles import write_json


def folder_name(step: int) -> str:
    return f"step-{step:07d}"


def save(
    root: Path, step: int, drafter: Drafter, optimizer: DrafterOptimizer, facts: dict[str, Any], keep: int
) -> Path:
    """Write `root`/step-NNNNNNN and drop all but the newest `keep`.

    Raises:
        TrainerError: a weight is not finite; such a drafter is worth nothing and must not replace a good one.
    """
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    broken = [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise TrainerError(f"weights of {broken[0]} are not finite; nothing was saved", where=str(root))
    final = root / folder_name(step)
    aside = root / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(state, aside / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), aside / "optimizer.pt")
    write_json(aside / "trainer.json", {"step": step, **facts})
    config = json.dumps(drafter.config.to_json("float32"), indent=2, sort_keys=True)
    (aside / "config.json").write_text(config + "\n", encoding="utf-8")
    for path in [*aside.iterdir(), aside]:
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    _sync(root)
    for old in sorted(root.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The shape of the drafter in `folder`, without its weights.

    Raises:
        ConfigError: no drafter there, or not a readable one.
    """
    path = folder / "config.json"
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        raise ConfigError(
            "no drafter there", where=str(path), next="name a step-* folder of checkpoints/"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a JSON file: {error}", where=str(path)) from None


def load_drafter(folder: Path) -> Drafter:
    """The drafter in `folder`, in float32.

    Raises:
        ConfigError: missing, unknown or wrongly shaped weights, by name: a loader that skips them would
            give a drafter that runs and foretells nothing.
    """
    drafter = Drafter(read_drafter_config(folder))
    path = folder / "model.safetensors"
    try:
        state = load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise ConfigError(f"cannot read the weights: {error}", where=str(path)) from None
    wanted = drafter.state_dict()
    for name, problem in (
        *((name, "is missing") for name in sorted(set(wanted) - set(state))),
        *((name, "is not a drafter's") for name in sorted(set(state) - set(wanted))),
        *(
            (name, f"has shape {tuple(state[name].shape)}, not {tuple(wanted[name].shape)}")
            for name in sorted(set(state) & set(wanted))
            if state[name].shape != wanted[name].shape
        ),
    ):
        raise ConfigError(f"weight {name} {problem}", where=str(path))
    drafter.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return drafter
