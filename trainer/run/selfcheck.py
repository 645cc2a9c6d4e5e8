"""Before the first step, with the run's own first batch: is what will be trained what was meant?

Masks, labels and taps are held to rules that are written here a second time, as a person would say them: one
query and one key, one slot, one layer at a time. Nothing of the fast code is used for them. Large batches are
sampled; which blocks are looked at is drawn from a fixed seed.

Rows R, row tokens S, anchors a row N, block size B.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.data.packing import Rows
from trainer.errors import Refused
from trainer.model.attention_spans import Spans, seen_by_kernels
from trainer.model.plain_states import allowed, far, plain_states
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.training.objective import Blocks
from trainer.training.step import DrafterStep

MASK_ELEMENTS = 100_000  # that are looked at, about a tenth of a second
LABEL_SLOTS = 20_000
TAP_TOKENS = 256
SMALLEST = 2.0**-126  # of float32's numbers with all their digits: a small gamma's weights have fewer
BUG = "this is a fault of the trainer or of what it runs on, not of the recipe; nothing was trained"


@dataclass(frozen=True)
class Checked:
    """How much was looked at, all of it right."""

    mask_elements: int
    slots: int
    taps: int
    tap_error: float | None  # the largest; None: whoever makes the states checks them

    def __str__(self) -> str:
        if self.tap_error is None:
            parts = f"{self.mask_elements:,} mask elements and {self.slots:,} slots"
            return f"self-check: {parts} are as they should be (who makes the states checks the taps)"
        return (
            f"self-check: {self.mask_elements:,} mask elements, {self.slots:,} slots and {self.taps} taps "
            f"are as they should be (taps to {self.tap_error:.1e})"
        )


def check(step: DrafterStep, target: Target | None, batch: Batch, uniform: Tensor) -> Checked:
    """Hold one micro-batch's masks, labels and taps to the slow rules.

    Args:
        target: whose states the batch holds; None: another process's.
        uniform: [R, S] from `trainer.training.objective.draw`.
    Raises:
        Refused: the first thing that is not as it should be, and how many are not.
    """
    blocks = step.blocks(batch.rows, uniform)
    config = step.drafter.config
    slots = check_labels(batch.rows, blocks, config.block_size, step.config.gamma, config.mask_token_id)
    elements = 0
    by_window = dict(zip(step.windows, step.masks(batch.rows, blocks), strict=True))
    for window, mask in by_window.items():
        elements += check_mask(batch.rows, blocks, config.block_size, window, mask)
    error = None if target is None else check_taps(target, batch.rows, batch.states)
    return Checked(elements, slots, 0 if target is None else len(target.taps), error)


def check_labels(rows: Rows, blocks: Blocks, size: int, gamma: float, mask_token_id: int) -> int:
    """Anchors, labels, weights, tokens and positions of the blocks, slot by slot; how many slots."""
    width = blocks.anchors.shape[1]
    chosen = _sample(len(rows) * width, max(1, LABEL_SLOTS // size))
    lists = _Lists(rows)
    table = [part.cpu().tolist() for part in (blocks.anchors, blocks.keep, blocks.labels, blocks.supervised)]
    anchors, keep, labels, supervised = table
    weights, tokens, positions = (
        part.cpu().unflatten(1, (width, -1)).tolist()
        for part in (blocks.weights.flatten(1), blocks.tokens, blocks.positions)
    )
    for number in chosen:
        row, block = divmod(number, width)
        anchor, alive = anchors[row][block], keep[row][block]
        where = f"row {row}, the block at token {anchor}"
        if alive and not lists.may_start(row, anchor):
            raise Refused(f"{where}: no block may start there", where="self-check of labels", next=BUG)
        for slot in range(size):
            wanted = lists.token(row, anchor) if alive and slot == 0 else mask_token_id
            _same(f"{where}, slot {slot}: token", tokens[row][block][slot], wanted)
            if alive:
                _same(
                    f"{where}, slot {slot}: position",
                    positions[row][block][slot],
                    lists.position(row, anchor) + slot,
                )
        for slot in range(1, size):
            label = lists.label(row, anchor, slot) if alive else None
            place = f"{where}, slot {slot}"
            _same(f"{place}: trained on", supervised[row][block][slot - 1], label is not None)
            if label is not None:
                _same(f"{place}: label", labels[row][block][slot - 1], label)
            weight = math.exp(-(slot - 1) / gamma) if label is not None else 0.0
            if not math.isclose(weights[row][block][slot - 1], weight, rel_tol=1e-5, abs_tol=SMALLEST):
                _same(f"{place}: weight", weights[row][block][slot - 1], weight)
    return len(chosen) * (size - 1)


def check_mask(rows: Rows, blocks: Blocks, size: int, window: int | None, mask: Any) -> int:
    """One layer's mask, element by element; how many elements.

    Args:
        mask: [R, 1, Q, S + Q] bool, flex attention's BlockMask, or our kernels' Spans.
        window: of a sliding layer; None: a full layer.
    """
    width, row_tokens = blocks.anchors.shape[1], rows.tokens.shape[1]
    keys = row_tokens + width * size
    chosen = _sample(len(rows) * width, max(2, MASK_ELEMENTS // (size * keys)))
    lists = _Lists(rows)
    anchors, keep = blocks.anchors.tolist(), blocks.keep.tolist()
    wrong, first, looked = 0, "", 0
    for number in chosen:
        row, block = divmod(number, width)
        queries = range(block * size, (block + 1) * size)
        found = seen(mask, row, list(queries))
        some, every = found.any(0).tolist(), found.all(0).tolist()
        for query, by_some, by_every in zip(queries, some, every, strict=True):
            for key in range(keys):
                wanted = lists.sees(row, anchors[row][block], keep[row][block], window, query, key, size)
                looked += 1
                if by_some[key] != wanted or by_every[key] != wanted:
                    wrong += 1
                    first = first or _told(
                        row, anchors[row][block], query % size, key, row_tokens, not wanted
                    )
    if wrong:
        kind = "a full layer" if window is None else f"a sliding layer of window {window}"
        raise Refused(
            f"{wrong:,} of {looked:,} elements of the mask of {kind} are wrong; {first}",
            where="self-check of the mask",
            next=BUG,
        )
    return looked


def _told(row: int, anchor: int, slot: int, key: int, row_tokens: int, seen_there: bool) -> str:
    what = f"context token {key}" if key < row_tokens else f"key {key - row_tokens} of the blocks"
    verb = "sees" if seen_there else "misses"
    return f"in row {row}, slot {slot} of the block at token {anchor} {verb} {what}"


def seen(mask: Any, row: int, queries: Sequence[int]) -> Tensor:
    """[ways, len(queries), keys] bool, on the CPU: what attention makes of a dense mask, a BlockMask or
    Spans, which are read in several ways.
    """
    if isinstance(mask, Tensor):
        return mask[row, :, list(queries)].cpu()
    if isinstance(mask, Spans):
        return seen_by_kernels(mask, row, queries)
    device = mask.kv_indices.device
    at = torch.tensor(queries, device=device)
    keys = torch.arange(mask.seq_lengths[1], device=device)
    query_tile, key_tile = at // mask.BLOCK_SIZE[0], keys // mask.BLOCK_SIZE[1]
    asked = mask.mask_mod(
        torch.tensor(row, device=device), torch.tensor(0, device=device), at[:, None], keys[None]
    )
    partly = _tiles(mask.kv_num_blocks, mask.kv_indices, row)[query_tile][:, key_tile]
    out = partly & asked
    if mask.full_kv_num_blocks is not None:
        out |= _tiles(mask.full_kv_num_blocks, mask.full_kv_indices, row)[query_tile][:, key_tile]
    return out.cpu()[None]


def _tiles(counts: Tensor, indices: Tensor, row: int) -> Tensor:
    """[query tiles, key tiles] bool of one row of flex attention's lists."""
    counts, indices = counts[row % len(counts), 0], indices[row % len(indices), 0].long()
    listed = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    # Entries behind the count mean nothing: they go to a column of their own, which is cut off.
    table = torch.zeros(len(counts), indices.shape[1] + 1, dtype=torch.bool, device=indices.device)
    return table.scatter_(1, torch.where(listed, indices, indices.shape[1]), True)[:, :-1]


@torch.no_grad()
def check_taps(target: Target, rows: Rows, states: States) -> float:
    """The batch's taps against the hidden states that transformers itself gives; the largest relative error.

    Of the beginning of one row's document, behind others where there are such: read alone, uncompiled and
    with attention written out. A tap must be nearest to the layer that it names, and near.
    """
    row = next((at for at in range(len(rows)) if bool(rows.supervised[at].any())), None)
    if row is None:
        raise Refused("its first batch has nothing to train on", where="self-check", next="check the data")
    part = _document(rows.documents[row].tolist(), rows.supervised[row].tolist())
    alone = rows.tokens[row : row + 1, part], rows.positions[row : row + 1, part]
    layers = [each[0] for each in plain_states(target, *alone)]
    largest, count = 0.0, len(target.taps)
    own, fused = states.taps[row, part].chunk(count, -1), target.run(*alone).taps[0].chunk(count, -1)
    for tap, mine, other in zip(target.taps, own, fused, strict=True):
        errors, most = [far(mine, layer) for layer in layers], allowed(far(other, layers[tap + 1]))
        nearest = min(range(len(errors)), key=errors.__getitem__)
        if nearest != tap + 1 or not errors[tap + 1] <= most:
            raise Refused(
                f"tap {tap} is {errors[tap + 1]:.3f} off the output of the target's layer {tap} "
                f"(at most {most:.3f}), nearest to hidden_states[{nearest}], not [{tap + 1}]",
                where="self-check of the taps",
                next=BUG,
            )
        largest = max(largest, errors[tap + 1])
    return largest


def _document(documents: list[int], supervised: list[bool]) -> slice:
    """The first TAP_TOKENS of a row's longest document that is trained on and not its first, if any is."""
    trained = {number for number, on in zip(documents, supervised, strict=True) if on}
    chosen = max(trained, key=lambda number: (number != documents[0], documents.count(number)))
    start = documents.index(chosen)
    return slice(start, start + min(documents.count(chosen), TAP_TOKENS))


class _Lists:
    """Rows as lists, and the rules about single tokens."""

    def __init__(self, rows: Rows) -> None:
        self.tokens, self.documents, self.positions, self.supervised = (
            part.cpu().tolist() for part in rows.parts()
        )

    def token(self, row: int, place: int) -> int:
        return int(self.tokens[row][place])

    def position(self, row: int, place: int) -> int:
        return int(self.positions[row][place])

    def may_start(self, row: int, place: int) -> bool:
        """Trained on, as is the next token of the same document; and not the document's first."""
        return (
            place + 1 < len(self.tokens[row])
            and self.supervised[row][place]
            and self.supervised[row][place + 1]
            and self.documents[row][place] == self.documents[row][place + 1]
            and place > 0
            and self.documents[row][place - 1] == self.documents[row][place]
        )

    def label(self, row: int, anchor: int, slot: int) -> int | None:
        """The token that a slot must foretell; None where there is none to train on."""
        place = anchor + slot
        if place >= len(self.tokens[row]) or self.documents[row][place] != self.documents[row][anchor]:
            return None
        return self.token(row, place) if self.supervised[row][place] else None

    def sees(
        self, row: int, anchor: int, alive: bool, window: int | None, query: int, key: int, size: int
    ) -> bool:
        """Whether one query sees one key (trainer/model/mask.py says the rule)."""
        if not alive:
            return False
        slot, row_tokens = query % size, len(self.tokens[row])
        if key < row_tokens:
            return (
                key < anchor
                and self.documents[row][key] == self.documents[row][anchor]
                and (window is None or anchor + slot - key < window)
            )
        key -= row_tokens
        return key // size == query // size and (window is None or key % size <= slot)


def _same(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise Refused(f"{what} is {found}, should be {wanted}", where="self-check of labels", next=BUG)


def _sample(count: int, most: int) -> list[int]:
    """All of range(count), or `most` of it."""
    return list(range(count)) if count <= most else sorted(random.Random(0).sample(range(count), most))
