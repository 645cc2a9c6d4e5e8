"""Packing of a store: every token once, nothing across documents, full rows, one order for everybody.

Run: python -m pytest tests/trainer/data/test_stored.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import stored as storing
from trainer.data.anchors import needed_width, valid_anchors
from trainer.data.packing import Rows, assign
from trainer.data.reader import Documents
from trainer.data.store import Store, Writer
from trainer.data.stored import StoredRows, cut
from trainer.errors import DataError


def store_of(folder: Path, documents: list[tuple[list[int], list[bool]]]) -> Store:
    """A store of these documents, without any text."""
    lengths = np.array([len(tokens) for tokens, _ in documents], dtype=np.int64)
    found = Documents(
        tokens=np.array([token for tokens, _ in documents for token in tokens], dtype=np.int32),
        supervised=np.array([mark for _, marks in documents for mark in marks], dtype=np.bool_),
        lengths=lengths,
        line_numbers=np.arange(1, len(documents) + 1),
        lines=len(documents),
        rows=len(documents),
        bad=[],
        other_mode=0,
    )
    with Writer(folder / "store", 1) as writer:
        writer.add(found, 0, "a.jsonl")
        return Store(writer.finish({"tokenizer_sha256": "x", "template": None}, ["a.jsonl"], "target"))


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> Iterator[None]:
    """A store for each example: waiting for the disk would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def numbered(lengths: list[int], chance: random.Random) -> list[tuple[list[int], list[bool]]]:
    """Documents whose tokens are all different: 1000 * document + place, from 1 on."""
    return [
        ([1000 * n + place + 1 for place in range(length)], [chance.random() < 0.7 for _ in range(length)])
        for n, length in enumerate(lengths)
    ]


def epoch(rows: StoredRows, number: int) -> Rows:
    return rows[torch.arange(number * len(rows), (number + 1) * len(rows))]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=25),
    row_tokens=st.integers(8, 40),
    seed=st.integers(0, 5),
    chance=st.randoms(use_true_random=False),
)
def test_every_token_once_no_document_across_another_masks_aligned(
    lengths: list[int], row_tokens: int, seed: int, chance: random.Random, tmp_path_factory: Any
) -> None:
    documents = numbered(lengths, chance)
    rows = StoredRows(store_of(tmp_path_factory.mktemp("s"), documents), row_tokens, seed, "split")
    supervised = {token: mark for each in documents for token, mark in zip(*each, strict=True)}
    for number in (0, 3):
        found: Counter[int] = Counter()
        packed = epoch(rows, number)
        assert packed.tokens.shape == (len(rows), row_tokens)
        for row in range(len(rows)):
            tokens, numbers, positions, marks = (part[row].tolist() for part in packed.parts())
            assert numbers == sorted(numbers) and numbers[0] == 0
            for place, token in enumerate(tokens):
                first = numbers.index(numbers[place])
                assert positions[place] == place - first == place - int(packed.doc_start[row, place])
                if token == 0:  # padding: last, a document of its own, never trained on
                    assert not marks[place] and not any(tokens[place:])
                    assert place == 0 or numbers[place] > numbers[first - 1] or tokens[first] == 0
                    continue
                found[token] += 1
                assert marks[place] is supervised[token]
                if positions[place]:  # what stands before a token in its document stands before it here
                    assert tokens[place - 1] == token - 1
                else:  # a document begins, or the next piece of a long one
                    assert (token - 1) % 1000 % row_tokens == 0
        assert found == Counter(supervised.keys())  # each exactly once


REALISTIC = [
    pytest.param(7.0, 0.9, 4096, id="chat"),
    pytest.param(6.2, 1.1, 3072, id="short"),
    pytest.param(8.3, 0.8, 8192, id="long answers"),
    pytest.param(8.8, 1.0, 49152, id="one row a batch"),
]


@pytest.mark.parametrize(("mean", "spread", "row_tokens"), REALISTIC)
def test_rows_are_97_percent_full_on_realistic_lengths(mean: float, spread: float, row_tokens: int) -> None:
    generator = np.random.default_rng(0)
    lengths = np.maximum(16, generator.lognormal(mean, spread, 20_000)).astype(np.int64)
    pieces = cut(lengths, row_tokens, "split")
    assert pieces.lengths.sum() == lengths.sum()
    rows = assign(pieces.lengths.tolist(), row_tokens)
    assert lengths.sum() / (len(rows) * row_tokens) >= 0.97


def first_fit_decreasing(lengths: list[int], row_tokens: int) -> int:
    """The plain reference: how many rows it needs."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((n for n, room in enumerate(free) if room >= length), None)
        if place is None:
            free.append(row_tokens - length)
        else:
            free[place] -= length
    return len(free)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=60), st.randoms(use_true_random=False))
def test_assignment_is_sound_and_counts_by_lengths_alone(lengths: list[int], chance: random.Random) -> None:
    rows = assign(lengths, 60)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= 60 for row in rows)
    shuffled = lengths.copy()
    chance.shuffle(shuffled)
    assert len(assign(shuffled, 60)) == len(rows)
    # A row is begun only when nothing fits the others: two half empty ones cannot be.
    assert sum(2 * sum(lengths[index] for index in row) <= 60 for row in rows) <= 1


def test_best_fit_needs_no_more_rows_than_first_fit_on_realistic_lengths() -> None:
    for seed in range(5):
        generator = np.random.default_rng(seed)
        lengths = np.clip(generator.lognormal(5, 1, 1500), 8, 1024).astype(int).tolist()
        assert len(assign(lengths, 1024)) <= first_fit_decreasing(lengths, 1024)


@pytest.fixture
def rows(tmp_path: Path) -> StoredRows:
    chance = random.Random(1)
    lengths = [chance.randint(5, 60) for _ in range(120)]
    return StoredRows(store_of(tmp_path, numbered(lengths, chance)), 64, 7, "split")


def same(left: Rows, right: Rows) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parts(), right.parts(), strict=True))


def test_any_row_can_be_had_without_those_before_it(rows: StoredRows) -> None:
    """Exact resume at any row: a new process that begins in the middle reads what the old one would have."""
    stream = [rows[rows.order(number, 4)] for number in range(3 * len(rows) // 4)]
    for step in (0, 1, len(rows) // 4, len(rows) // 2, len(stream) - 1):
        fresh = StoredRows(rows.store, 64, 7, "split")
        assert same(fresh[fresh.order(step, 4)], stream[step])


def test_the_global_order_is_the_same_at_any_number_of_ranks(rows: StoredRows) -> None:
    whole = rows[rows.order(5, 12)]
    for world in (1, 2, 3, 4, 6, 12):
        share = 12 // world
        parts = []
        for rank in range(world):
            mine = StoredRows(rows.store, 64, 7, "split")  # each rank maps the store for itself
            parts.append(mine[mine.order(5, 12)[rank * share : (rank + 1) * share]])
        together = Rows(*(torch.cat(part) for part in zip(*(each.parts() for each in parts), strict=True)))
        assert same(together, whole)


def test_epochs_and_seeds_differ_and_repeat(rows: StoredRows) -> None:
    first, second = epoch(rows, 0), epoch(rows, 1)
    assert not same(first, second)
    assert Counter(first.tokens.flatten().tolist()) == Counter(second.tokens.flatten().tolist())
    assert not same(first, epoch(StoredRows(rows.store, 64, 8, "split"), 0))
    assert same(second, epoch(StoredRows(rows.store, 64, 7, "split"), 1))
    groups = [{frozenset(rows.members(n + e * len(rows)).tolist()) for n in range(len(rows))} for e in (0, 1)]
    assert groups[0] != groups[1]  # companions change too


def test_long_documents_are_split_or_refused_by_rule(tmp_path: Path) -> None:
    documents = numbered([30, 100, 64, 65, 10], random.Random(0))
    store = store_of(tmp_path, documents)
    split = StoredRows(store, 64, 0, "split")
    assert split.pieces.lengths.tolist() == [30, 64, 36, 64, 64, 1, 10]
    assert split.pieces.documents.tolist() == [0, 1, 1, 2, 3, 3, 4] and not len(split.pieces.refused)
    refuse = StoredRows(store, 64, 0, "refuse")
    assert refuse.pieces.lengths.tolist() == [30, 64, 10] and refuse.pieces.refused.tolist() == [1, 3]
    assert set(epoch(refuse, 0).tokens.flatten().tolist()) - {0} == {
        token for n in (0, 2, 4) for token in documents[n][0]
    }
    assert refuse.facts()["documents_refused"] == 2
    with pytest.raises(DataError, match="every document is longer than a row of 8 tokens") as caught:
        StoredRows(store, 8, 0, "refuse")
    assert "train.data.long: split" in caught.value.next


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    per_document=st.integers(1, 12),
    long=st.sampled_from(["split", "refuse"]),
    at_once=st.integers(1, 50),
    chance=st.randoms(use_true_random=False),
)
def test_the_width_is_what_the_objective_counts(
    lengths: list[int],
    per_document: int,
    long: Any,
    at_once: int,
    chance: random.Random,
    tmp_path_factory: Any,
) -> None:
    lengths = [*lengths, 3]
    rows = StoredRows(store_of(tmp_path_factory.mktemp("s"), numbered(lengths, chance)), 16, 0, long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storing, "COUNTED_AT_ONCE", at_once)
        packed = epoch(rows, 0)
        assert rows.needed_width(per_document) == needed_width(packed, per_document)
        assert rows._valid_anchors().sum() == valid_anchors(packed).sum()
        assert rows.has_anchors() == bool(valid_anchors(packed).any())


def test_fill_is_said(rows: StoredRows) -> None:
    packed = epoch(rows, 0)
    assert rows.full == int((packed.tokens > 0).sum()) / packed.tokens.numel()
    assert 0.9 < rows.full <= 1
