"""Who made a checkpoint, of what: code, target, rows; and where two accounts of that differ."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from trainer.data.packing import Rows

PACKAGE = Path(__file__).resolve().parents[1]
SAMPLES = 16  # places of a weights file that are read
SAMPLE_BYTES = 1 << 16
ABSENT = "nothing"
SHOWN = 120  # characters of a value that differs


def code() -> dict[str, Any]:
    """This trainer's sources, the release that they came in, and the versions under them."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return {
        "sha256": digest.hexdigest(),
        "release": _release(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _release() -> str | None:
    try:
        manifest = json.loads((PACKAGE.parent / ".dflash-release.json").read_text(encoding="utf-8"))
        return str(manifest["release"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def target_digest(folder: Path) -> str:
    """sha256 over a target's configuration, tokenizer and weights.

    Of each weights file: name, size, and pieces from its head to its end. Reading 50 GB would hold up every
    start, and another training of the same model differs everywhere.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".json":
                digest.update(file.read())
                continue
            for place in range(SAMPLES):
                file.seek(place * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def rows_digest(rows: Rows) -> str:
    """sha256 over the rows' tokens and which of them are trained on."""
    digest = hashlib.sha256()
    for start in range(0, len(rows), 1024):
        few = rows[slice(start, start + 1024)]
        digest.update(few.tokens.int().numpy().data)
        digest.update(few.supervised.numpy().data)
    return digest.hexdigest()


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """{"optimizer.lr": 0.01, "optimizer.groups[0].name": ...} of nested plain data."""
    found: dict[str, Any] = {}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            found |= flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            found |= flat(inner, f"{path}[{number}]")
    else:
        found[path] = value
    return found


def completed(known: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`known`, and the keys that it lacks from `defaults`, at every depth."""
    both = {
        key: completed(value, defaults[key])
        for key, value in known.items()
        if isinstance(value, Mapping) and isinstance(defaults.get(key), Mapping)
    }
    return {**defaults, **known, **both}


def _shown(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}..."


def differences(there: Any, here: Any, besides: Collection[str] = ()) -> list[str]:
    """ "key.path: a there, b here" for every value that differs; not below the keys of `besides`. Of long
    ones (a chat template) the beginning.
    """
    one, other = flat(there), flat(here)
    return [
        f"{key}: {_shown(one.get(key, ABSENT))} there, {_shown(other.get(key, ABSENT))} here"
        for key in sorted({*one, *other})
        if one.get(key, ABSENT) != other.get(key, ABSENT)
        and not any(key == free or key.startswith((f"{free}.", f"{free}[")) for free in besides)
    ]
