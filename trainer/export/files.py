"""Folders with config.json and safetensors: read whole or sharded, written aside and renamed, and read again
before anybody else does.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.errors import ConfigError, TrainerError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_json(path: Path, missing: str, next: str = "") -> dict[str, Any]:
    """The keys and values in a JSON file.

    Raises:
        ConfigError: `missing` when there is no such file; not JSON, or not keys and values.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{missing} ({error.strerror})", where=str(path), next=next) from None
    except ValueError as error:  # broken JSON, or not UTF-8
        raise ConfigError(f"not a JSON file: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise ConfigError("keys and values are expected", where=str(path))
    return data


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: one, or the shards that its index names.

    Raises:
        ConfigError: neither is there.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = read_json(folder / INDEX, f"no weights: neither {WEIGHTS} nor its index")
    shards = index.get("weight_map")
    if not isinstance(shards, dict):
        raise ConfigError("no weight_map in it", where=str(folder / INDEX))
    return [folder / name for name in sorted(set(shards.values()))]


def header(path: Path) -> dict[str, Any]:
    """A safetensors file's table of contents, name -> dtype and shape; no tensor is read.

    Raises:
        ConfigError: not such a file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("its table of contents is longer than the file")
            table: dict[str, Any] = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"cannot read the weights: {error}", where=str(path)) from None
    table.pop("__metadata__", None)
    return table


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
    if folder.exists():
        raise ConfigError("is there already", where=str(folder), next="name a new folder")
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
