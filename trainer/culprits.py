"""Whose values were not finite, where several work on one step: a rank's, or a thread's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

Who = int | str
"""A rank, or a thread's name."""


class Culprits(NamedTuple):
    """Who brought non-finite values to a step, noted before the sum over all hides whose they were."""

    bad: Tensor  # [W] whether gradient or loss of each worker were not finite; on the device
    who: Sequence[Who]  # W of them


def named(counts: Mapping[Who, int]) -> str:
    """Each with its count, the most frequent first: "rank 1 (3), drafter-0 (1)"."""
    names = {who: f"rank {who}" if isinstance(who, int) else who for who in counts}
    return ", ".join(f"{names[who]} ({counts[who]})" for who in sorted(counts, key=lambda who: -counts[who]))


def rank_of(counts: Mapping[Who, int]) -> int | None:
    """The rank with the highest count; None: several share it, or it is a thread's."""
    most = [who for who, count in counts.items() if count == max(counts.values())]
    return most[0] if len(most) == 1 and isinstance(most[0], int) else None
