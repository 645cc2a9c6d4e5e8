"""What is in a model's folder, told from its small files and headers, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.errors import ConfigError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
BFLOAT16 = "<u2"  # numpy has none
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": BFLOAT16}


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
    index = read_json(
        folder / INDEX, f"no weights: neither {WEIGHTS} nor its index", "copy the folder again, whole"
    )
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ConfigError("no weight_map in it", where=str(folder / INDEX), next="copy the folder again")
    for weight, name in shards.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ConfigError(
                f"weight {weight} is in {name!r}, no file of this folder", where=str(folder / INDEX)
            )
    return [folder / name for name in sorted(set(shards.values()))]


def header(path: Path) -> dict[str, Any]:
    """A safetensors file's table of contents, name -> dtype and shape; no tensor is read.

    Raises:
        ConfigError: not such a file.
    """
    return _contents(path)[0]


def read_floats(path: Path, name: str) -> NDArray[np.float32]:
    """One tensor of a safetensors file, its numbers in a row as float32.

    Raises:
        ConfigError: not such a file, or no plain floats of that name in it.
    """
    table, begin = _contents(path)
    try:
        entry = table[name]
        start, stop = entry["data_offsets"]
        kind = FLOATS[entry["dtype"]]
        with path.open("rb") as file:
            file.seek(begin + start)
            content = file.read(stop - start)
        numbers = np.frombuffer(content, kind)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"cannot read weight {name}: {error}", where=str(path)) from None
    if kind == BFLOAT16:  # the upper half of a float32
        return (numbers.astype("<u4") << 16).view("<f4")
    return numbers.astype("<f4")


def _contents(path: Path) -> tuple[dict[str, Any], int]:
    """The table of contents, and where in the file the tensors begin."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("its table of contents is longer than the file")
            table: dict[str, Any] = json.loads(file.read(length))
            table.pop("__metadata__", None)
    except (OSError, ValueError, AttributeError, TypeError, struct.error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot read the weights: {why}", where=str(path), next="copy the file again, whole"
        ) from None
    return table, 8 + length


def refuse_existing(folder: Path) -> None:
    """Raises ConfigError: the new folder's name is taken."""
    if folder.exists():
        raise ConfigError("is there already", where=str(folder), next="name a new folder")
