"""Whose values were not finite, where several work on one step: a rank's, or a thread's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

Who = int | str
"""A rank, or a thread's name."""


class Own(NamedTuple):
    """What each had by itself, before the sum over all hid whose it was."""

    bad: Tensor  # [W] whether gradient or loss were not finite; on the device
    who: Sequence[Who]  # W of them


def named(counts: Mapping[Who, int]) -> str:
    """For people, the most frequent first: "rank 1 (3), drafter-0 (1)"."""
    names = {who: f"rank {who}" if isinstance(who, int) else who for who in counts}
    return ", ".join(f"{names[who]} ({counts[who]})" for who in sorted(counts, key=lambda who: -counts[who]))


def rank_of(counts: Mapping[Who, int]) -> int | None:
    """The one rank that stands out; None: there is none."""
    most = [who for who, count in counts.items() if count == max(counts.values())]
    return most[0] if len(most) == 1 and isinstance(most[0], int) else None
