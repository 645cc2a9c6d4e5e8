"""Small inputs for `prepare`, and the bytes of the store that it makes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.data.prepare import Tolerance, prepare
from trainer.data.reader import Settings
from trainer.data.store import Store

Make = Callable[[str], Path]
ALL = Tolerance(share=1.0)


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    chance = random.Random(seed)

    def words() -> str:
        return " ".join(chance.choices(["the", "quick", "fox", "é\U0001f600", "jumps\n\n", "over"], k=9))

    made: list[dict[str, Any]] = []
    for number in range(count):
        kind = number % 4
        if kind == 0:
            made.append({"text": words()})
        elif kind == 1:
            made.append({"input_ids": [5, 6, 7, number % 200], "loss_mask": [0, 0, 1, 1]})
        else:
            turns = [{"role": role, "content": "x" + words()} for role in ("user", "assistant") * kind]
            made.append({"messages": turns})
    return made


def write(path: Path, *values: Any) -> Path:
    path.write_bytes(
        b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in values)
    )
    return path


def content(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


def make(folder: Path, source: Path, target: Path, **more: Any) -> Store:
    given = {"tolerance": ALL, "say": lambda text: None, **more}
    return prepare([source], Settings(str(target)), folder, **given)
