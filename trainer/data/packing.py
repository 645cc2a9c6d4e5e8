"""Documents into rows of one fixed size, with document numbers and positions: every later shape is fixed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """Token ids, and which of them are trained on (the response); both of one length."""

    tokens: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class Rows:
    """R packed rows of S tokens. Documents are numbered from 0 along each row; padding comes last.

    All tensors are [R, S]: tokens and positions (restarting with each document) are int64, documents int64,
    supervised bool.
    """

    tokens: Tensor
    documents: Tensor
    positions: Tensor
    supervised: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, rows: Tensor | slice) -> Rows:
        return Rows(self.tokens[rows], self.documents[rows], self.positions[rows], self.supervised[rows])

    def to(self, device: torch.device) -> Rows:
        return Rows(*(part.to(device, non_blocking=True) for part in self.parts()))

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.documents, self.positions, self.supervised

    @property
    def doc_start(self) -> Tensor:
        """[R, S] index in its row of the first token of each token's document."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) - self.positions


def from_tokens(tokens: Tensor, supervised_from: int, ends: Collection[int] = ()) -> Rows:
    """Rows that are one document each, trained on from this position on. tokens: [R, S].

    Args:
        ends: tokens that end what is written from there on. Decoding stops there: what follows is nobody's.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
    written = positions >= supervised_from
    over = written & torch.isin(tokens, torch.tensor(sorted(ends), dtype=tokens.dtype, device=tokens.device))
    before = over.cumsum(1) - over.long() == 0
    return Rows(tokens, torch.zeros_like(tokens), positions, written & before)


def split_long(document: Document, limit: int) -> list[Document]:
    """A document longer than a row becomes several; nothing is dropped."""
    return [
        Document(document.tokens[start : start + limit], document.supervised[start : start + limit])
        for start in range(0, len(document.tokens), limit)
    ]


def assign(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: which documents share a row, in a fixed order for fixed lengths.

    The longest first, each into the row that it fills most; of equal lengths the earlier first. How many rows
    come out depends on the lengths alone, not on their order.

    Args:
        lengths: each from 1 to row_tokens.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # rows by how many tokens still fit
    some = 0  # bit n: with_room[n] is not empty; the lowest bit from a length on is the best fit
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length = lengths[index]
        fitting = some >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            place = with_room[room].pop()
            if not with_room[room]:
                some ^= 1 << room
        else:
            room, place = row_tokens, len(rows)
            rows.append([])
        rows[place].append(index)
        with_room[room - length].append(place)
        some |= 1 << (room - length)
    return rows


def pack(documents: Sequence[Document], row_tokens: int, pad_id: int = 0) -> Rows:
    """Every token of every document exactly once, no document across two rows (long ones are split first)."""
    pieces = [piece for document in documents for piece in split_long(document, row_tokens) if piece.tokens]
    members = assign([len(piece.tokens) for piece in pieces], row_tokens)
    shape = (len(members), row_tokens)
    tokens, numbers = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.int64)
    positions, supervised = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for row, indices in enumerate(members):
        start = 0
        for number, index in enumerate(indices):
            part = slice(start, start + len(pieces[index].tokens))
            tokens[row, part] = torch.tensor(pieces[index].tokens)
            supervised[row, part] = torch.tensor(pieces[index].supervised)
            numbers[row, part] = number
            positions[row, part] = torch.arange(part.stop - start)
            start = part.stop
        numbers[row, start:] = len(indices)
        positions[row, start:] = torch.arange(row_tokens - start)
    return Rows(tokens, numbers, positions, supervised)
