"""What several processes do in turn before training, so that the run's folder and its data are made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from trainer.data.dataset import Dataset
from trainer.data.packing import Rows
from trainer.topology.ranks import Ranks

T = TypeVar("T")
LONG_S = 4 * 3600.0
"""For what the first rank does alone; if it hangs, its own heartbeat says so much earlier."""


def first_then_others(ranks: Ranks | None, do: Callable[[], T], what: str) -> T:
    """`do` on the first rank, and when it is done on the others."""
    if ranks is None:
        return do()
    if ranks.first:
        done = do()
        ranks.meet(what, LONG_S)
        return done
    ranks.meet(what, LONG_S)
    return do()


def same_data(ranks: Ranks | None, build: Callable[[], Dataset], run: Path) -> Dataset:
    """The run's rows, made by the first rank: how many there are may depend on the time they took.

    The others read them from a file of the run's folder, mapped: cached states are in memory once. Rows of a
    prepared store lie in such files already, and each rank opens it.
    """
    if ranks is None:
        return build()
    path = run / "data.pt"
    data: Dataset | None = None
    if ranks.first:
        data = build()
        if isinstance(data.rows, Rows):
            torch.save(data, path)
    ranks.meet("the data", LONG_S)
    if data is None:
        data = torch.load(path, mmap=True, weights_only=False) if path.exists() else build()
    ranks.meet("the data to be read", LONG_S)
    if ranks.first:
        path.unlink(missing_ok=True)
    return data
