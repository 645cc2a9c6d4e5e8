"""Folders with config.json and safetensors: read whole or sharded, written aside and renamed, and read again
before anybody else does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.errors import ConfigError, TrainerError
from trainer.model.folder import CONFIG, WEIGHTS, header, refuse_existing

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_tensors(
    paths: Iterable[Path], wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The tensors whose names are wanted.

    Raises:
        ConfigError: a file that is damaged, a name in two shards, or a tensor that is no plain float.
    """
    found: dict[str, Tensor] = {}
    for path in paths:
        for name, entry in header(path).items():
            if not wanted(name):
                continue
            if entry["dtype"] not in FLOATS:
                raise ConfigError(
                    f"weight {name} is {entry['dtype']}; only {', '.join(FLOATS)} can be read",
                    where=str(path),
                    next="take a checkpoint that is not quantised",
                )
            if name in found:
                raise ConfigError(f"weight {name} is in two files", where=str(path))
            try:
                with safe_open(path, framework="pt") as file:
                    found[name] = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read the weights: {error}", where=str(path)) from None
    return found


def write_folder(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """A new folder with config.json and model.safetensors, complete and on disk when it has its name.

    Bytes depend on content alone: keys in order, tensors contiguous and in no storage of others.

    Raises:
        ConfigError: the folder is there already.
        TrainerError: it cannot be written, or a weight is not finite.
    """
    broken = sorted(name for name, tensor in state.items() if not bool(tensor.isfinite().all()))
    if broken:
        raise TrainerError(f"weight {broken[0]} is not finite; nothing was written", where=str(folder))
    refuse_existing(folder)
    aside = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        aside.mkdir(parents=True)
        own = {name: state[name].detach().clone().contiguous() for name in sorted(state)}
        save_file(own, aside / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (aside / CONFIG).write_text(text, encoding="utf-8")
        for path in (aside / WEIGHTS, aside / CONFIG, aside):
            _sync(path)
        aside.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TrainerError(f"cannot write: {error.strerror}", where=str(folder)) from None
    except SafetensorError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TrainerError(f"cannot write: {error}", where=str(folder)) from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
