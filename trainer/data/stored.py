"""Rows of a token store, packed anew for every epoch.

Everything follows from (store, row size, seed): row number g, counted through all epochs, is the same on
every machine and at any number of ranks, and can be had without the rows before it. Documents are never cut
silently: one longer than a row is split into pieces that begin anew at position 0, or left out and counted.

Rows R, row tokens S, pieces P.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.packing import Rows, assign
from trainer.data.store import Store
from trainer.errors import DataError

EPOCHS_KEPT = 2  # a batch may lie across the end of one
COUNTED_AT_ONCE = 1 << 24  # tokens


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that fit a row: where they are in the store's tokens."""

    starts: NDArray[np.int64]  # [P]
    lengths: NDArray[np.int64]  # [P]
    documents: NDArray[np.int64]  # [P] which document each is of
    refused: NDArray[np.int64]  # documents left out


def cut(lengths: NDArray[np.int64], row_tokens: int, long: Literal["split", "refuse"]) -> Pieces:
    """Documents [D] of these lengths, one after the other, as pieces of at most row_tokens."""
    ends = np.cumsum(lengths)
    counts = -(-lengths // row_tokens)
    refused = np.flatnonzero(lengths > row_tokens) if long == "refuse" else np.empty(0, dtype=np.int64)
    counts[refused] = 0
    documents = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(documents)) - np.repeat(
        np.cumsum(counts) - counts, counts
    )  # number in its document
    starts = (ends - lengths)[documents] + within * row_tokens
    return Pieces(starts, np.minimum(row_tokens, ends[documents] - starts), documents, refused)


class StoredRows:
    """The endless sequence of packed rows of a store; as long as one epoch to `len`.

    Raises:
        DataError: no document is left.
    """

    def __init__(self, store: Store, row_tokens: int, seed: int, long: Literal["split", "refuse"]) -> None:
        self.store, self.row_tokens, self.seed = store, row_tokens, seed
        self.pieces = cut(store.lengths, row_tokens, long)
        if not len(self.pieces.starts):
            raise DataError(
                f"every document is longer than a row of {row_tokens:,} tokens",
                where=str(store.folder),
                next="give train.data.row_tokens a larger value, or train.data.long: split",
            )
        self._epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._pack)
        self._count = len(self._epoch(0))

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> float:
        """Share of an epoch's tokens that are no padding."""
        return float(self.pieces.lengths.sum()) / (self._count * self.row_tokens)

    def facts(self) -> dict[str, Any]:
        """For the checkpoint: whose rows these are, and how documents became rows."""
        return {
            **self.store.facts(),
            "rows": self._count,
            "row_tokens": self.row_tokens,
            "seed": self.seed,
            "documents_refused": len(self.pieces.refused),
        }

    def _pack(self, epoch: int) -> list[NDArray[np.int64]]:
        """The pieces of each row of an epoch, in the epoch's order.

        Which of the pieces of equal length go together, the order of the rows, and of the pieces in a row,
        are drawn anew; the number of rows stays (`assign`).
        """
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        shuffled = generator.permutation(len(self.pieces.lengths))
        rows = assign(self.pieces.lengths[shuffled].tolist(), self.row_tokens)
        members = [shuffled[generator.permutation(row)] for row in rows]
        return [members[place] for place in generator.permutation(len(members))]

    def members(self, row: int) -> NDArray[np.int64]:
        """Pieces of row number `row`, counted through all epochs, in their order."""
        epoch, place = divmod(row, self._count)
        return self._epoch(epoch)[place]

    def order(self, number: int, size: int) -> Tensor:
        """Numbers of the rows of batch `number` [size]."""
        return torch.arange(number * size, (number + 1) * size)

    def __getitem__(self, numbers: Tensor) -> Rows:
        """The rows of these numbers, counted through all epochs."""
        shape = (len(numbers), self.row_tokens)
        tokens, documents, positions = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        supervised = np.zeros(shape, dtype=np.bool_)
        for at, row in enumerate(numbers.tolist()):
            start = 0
            members = self.members(row)
            for number, piece in enumerate(members):
                length = int(self.pieces.lengths[piece])
                here = slice(start, start + length)
                there = slice(int(self.pieces.starts[piece]), int(self.pieces.starts[piece]) + length)
                tokens[at, here] = self.store.tokens[there]
                supervised[at, here] = self.store.supervised[there]
                documents[at, here] = number
                positions[at, here] = np.arange(length)
                start += length
            documents[at, start:] = len(members)  # padding comes last, as a document of its own
            positions[at, start:] = np.arange(self.row_tokens - start)
        return Rows(*(torch.from_numpy(part) for part in (tokens, documents, positions, supervised)))

    def needed_width(self, per_document: int) -> int:
        """The most anchors that any row of the first epoch can have; in later epochs a row of more leaves a
        few out, evenly (`trainer.training.objective.choose_anchors`).
        """
        anchors = np.minimum(self._valid_anchors(), per_document)
        return max(1, max(int(anchors[row].sum()) for row in self._epoch(0)))

    def has_anchors(self) -> bool:
        """Whether any token may start a block."""
        return any(bool(valid.any()) for valid in self._counted())

    def _valid_anchors(self) -> NDArray[np.int64]:
        """[P] tokens of each piece that may start a block."""
        return np.concatenate(list(self._counted()))

    def _counted(self) -> Iterator[NDArray[np.int64]]:
        """How many tokens of each piece may start a block: supervised, not its first, and so is the next."""
        first, last = self.pieces.starts + 1, self.pieces.starts + self.pieces.lengths - 1
        # A stretch of the store at a time: it may be larger than memory.
        groups = np.flatnonzero(np.diff(last // COUNTED_AT_ONCE, prepend=-1))
        for start, stop in zip(groups, [*groups[1:], len(first)], strict=True):
            low, high = int(first[start]) - 1, int(last[stop - 1]) + 1
            marks = np.asarray(self.store.supervised[low:high])
            pairs = np.concatenate([[0], np.cumsum(marks[:-1] & marks[1:], dtype=np.int64)])
            a, b = (np.minimum(ends[start:stop] - low, len(marks) - 1) for ends in (first, last))
            yield np.where(b > a, pairs[b] - pairs[a], 0)
