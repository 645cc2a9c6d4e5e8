"""Folders with config.json and safetensors: written aside and renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.tensorfile import write_tensors
from trainer.errors import TrainerError
from trainer.model.folder import CONFIG, WEIGHTS, refuse_existing
from trainer.shortage import is_shortage
from trainer.writing import FULL, ROOM, sync


def write_folder(
    folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor], check: Callable[[Path], None]
) -> None:
    """A new folder with config.json and model.safetensors: complete, on disk, checked when it has its name.

    Bytes depend on content alone: keys and tensors in order.

    Args:
        check: of what was written, where it lies until it has its name; what it raises leaves no folder.
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
        write_tensors(aside / WEIGHTS, {name: state[name] for name in sorted(state)})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (aside / CONFIG).write_text(text, encoding="utf-8")
        for path in (aside / CONFIG, aside):
            sync(path)
        check(aside)
        aside.rename(folder)
        sync(folder.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not isinstance(error, OSError) or is_shortage(error):
            raise
        next = ROOM if error.errno in FULL else "name another place"
        raise TrainerError(f"cannot write: {error.strerror}", where=str(folder), next=next) from None
