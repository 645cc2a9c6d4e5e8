"""The trainer's contract as slow loops over single queries, keys, tokens and slots.

Nothing here imports the code under test; every function says one sentence of the contract.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """One row: document number and supervision of every token, and the blocks drawn on it."""

    documents: list[int]
    supervised: list[bool]
    anchors: list[int]
    keep: list[bool]

    @property
    def starts(self) -> list[int]:
        return [self.documents.index(number) for number in self.documents]

    @property
    def positions(self) -> list[int]:
        return [place - start for place, start in enumerate(self.starts)]


def layout(lengths: list[int], blocks: int, seed: int) -> Layout:
    """Documents of these lengths; anchors anywhere in them, next to each other as often as not, some dead."""
    chance = random.Random(seed)
    documents = [number for number, length in enumerate(lengths) for _ in range(length)]
    size = len(documents)
    first = chance.randrange(size)
    near = range(first, min(size, first + blocks))  # neighbours, one token apart
    far = chance.sample(range(size), min(blocks, size))
    anchors = sorted(chance.sample(sorted({*near, *far}), min(blocks, size)))
    return Layout(
        documents,
        [chance.random() < 0.75 for _ in documents],
        anchors,
        [chance.random() < 0.8 for _ in anchors],
    )


def sees(row: Layout, block_size: int, window: int | None, query: int, key: int) -> bool:
    """Whether one query (a slot of a block) sees one key (a context token, or a slot of a block)."""
    block, slot = query // block_size, query % block_size
    if not row.keep[block]:
        return False  # a dead block is nowhere
    anchor = row.anchors[block]
    size = len(row.documents)
    if key < size:
        if key >= anchor:
            return False  # the target has not read the anchor when the block is drafted
        if row.documents[key] != row.documents[anchor]:
            return False
        if window is None:
            return True
        # The slot stands at token anchor + slot; a window of W tokens ends with the slot itself.
        return (anchor + slot) - key <= window - 1
    other, other_slot = (key - size) // block_size, (key - size) % block_size
    if other != block:
        return False
    return True if window is None else other_slot <= slot


def mask(row: Layout, block_size: int, window: int | None) -> Tensor:
    """[Q, S + Q] bool."""
    queries = len(row.anchors) * block_size
    keys = len(row.documents) + queries
    return torch.tensor(
        [[sees(row, block_size, window, query, key) for key in range(keys)] for query in range(queries)]
    )


def may_start(row: Layout, place: int) -> bool:
    """An anchor and the token after it are both supervised and of one document; some context is before it."""
    follower = place + 1
    return (
        follower < len(row.documents)
        and row.documents[follower] == row.documents[place]
        and row.supervised[place]
        and row.supervised[follower]
        and row.positions[place] > 0
    )


def slot_weight(row: Layout, block: int, slot: int, gamma: float) -> float:
    """exp(-(k-1)/gamma) for slot k, if its label is a supervised token of the anchor's own document."""
    anchor = row.anchors[block]
    label = anchor + slot
    if not row.keep[block] or label >= len(row.documents):
        return 0.0
    if row.documents[label] != row.documents[anchor] or not row.supervised[label]:
        return 0.0
    return math.exp(-(slot - 1) / gamma)


def dpace(confidence: list[float], supervised: list[bool], alpha: float) -> list[float]:
    """D-PACE: slot k weighs the sum over j >= k of the product of the smoothed confidences up to j.

    Slots without a label are no factor, no summand, and have no weight.
    """
    slots = [k for k, given in enumerate(supervised) if given]
    weights = [0.0] * len(confidence)
    for k in slots:
        for j in slots:
            if j >= k:
                factors = [(1 - alpha) * confidence[i] + alpha for i in slots if i <= j]
                weights[k] += math.prod(factors)
    return weights
