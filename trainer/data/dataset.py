"""The rows of a run, with the target's states of them where those are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.data import prompts as texts
from trainer.data.anchors import needed_width, valid_anchors
from trainer.data.bad_rows import newly_bad
from trainer.data.batch import Batch, without_bad_rows
from trainer.data.continuations import write
from trainer.data.named_store import named_store
from trainer.data.packing import Rows, from_tokens
from trainer.data.stored import StoredRows
from trainer.model.tapped_model import States
from trainer.model.target import Target, is_single
from trainer.model.target_files import end_ids
from trainer.sections import TrainConfig
from trainer.words import plural

Say = Callable[[str], None]
Beat = Callable[[], None]


@dataclass
class Dataset:
    """R rows, or the endless sequence of a store's, R an epoch.

    `states` is None when the target reads them anew at every step.
    """

    rows: Rows | StoredRows
    states: States | None
    identity: dict[str, Any]
    seconds: float
    bad_rows: list[int]
    full: bool = False  # the target's final states are needed too, for labels

    def order(self, seed: int) -> Callable[[int, int], Tensor]:
        """A fixed endless order of rows: (batch, size) -> what `batch` takes [size]."""
        return self.rows.order if isinstance(self.rows, StoredRows) else texts.row_order(len(self.rows), seed)

    def needed_width(self, per_document: int) -> int:
        """The fixed width of a row's anchors that leaves none out."""
        if isinstance(self.rows, StoredRows):
            return self.rows.needed_width(per_document)
        return needed_width(self.rows, per_document)

    def has_anchors(self) -> bool:
        """Whether any token may start a block; else nothing can be trained on."""
        rows = self.rows
        return rows.has_anchors() if isinstance(rows, StoredRows) else bool(valid_anchors(rows).any())

    def describe(self) -> str:
        """One line for the log."""
        known, rows = self.identity, self.rows
        if isinstance(rows, StoredRows):
            counts = rows.store.counts
            refused = len(rows.pieces.refused)
            left_out = f", {plural(refused, 'document')} longer than a row left out" if refused else ""
            held = f"{plural(counts['documents'], 'document')}, {plural(counts['supervised'], 'token')}"
            return (
                f"data {plural(len(rows), 'row')} of {rows.row_tokens} tokens an epoch, "
                f"{rows.full:.1%} full, from store {known['store']}: {held} trained on{left_out}"
            )
        trained = int(rows.supervised.sum())
        return (
            f"data {plural(len(rows), 'row')} of {rows.tokens.shape[1]} tokens, {trained:,} trained on, "
            f"from {plural(known['files'], 'file')}, in {self.seconds:.1f} s"
        )

    def batch(self, index: Tensor, target: Target) -> tuple[Batch, Tensor | None]:
        """The rows at `index` on the target's device with their states; which of them are bad, if not known
        yet.
        """
        here = self.rows[index]
        rows = here.to(target.device)
        if self.states is None:
            single = is_single(here.documents)  # no wait: the host has the rows
            states = target.states(rows.tokens, rows.positions, rows.documents, self.full, single)
            batch, bad = without_bad_rows(rows, states)
            return replace(batch, host=here), bad
        taps, final = self.states.taps[index].to(target.device), self.states.final
        states = States(taps, None if final is None else final[index].to(target.device))
        return Batch(rows, states, here), None


def build(config: TrainConfig, target: Target, tokenizer: Any, say: Say, beat: Beat) -> Dataset:
    """Make the run's rows.

    Raises:
        DataError: too many rows have non-finite states, or there is no text.
    """
    started = time.monotonic()
    full = config.objective.labels != "data"
    if config.data.source == "store":
        stored = open_store(config)
        return Dataset(stored, None, stored.facts(), time.monotonic() - started, [], full)
    rows: Rows
    states: States | None
    if config.data.continuations:
        rows, states = _continuations(config, target, tokenizer, say, beat)
    else:
        end_id = next(iter(end_ids(target.config)), None)  # without any, nothing stands behind a text
        rows = texts.packed_text(tokenizer, config.data.rows, config.data.row_tokens, end_id, config.seed)
        states = _read_once(config, target, rows, beat) if config.data.states == "cached" else None
    bad: list[int] = []
    if states is not None:
        rows, states, bad = drop_bad_rows(rows, states, config.data.max_bad_rows)
    identity = {**texts.identity(held_out=False), "rows": len(rows), "row_tokens": config.data.row_tokens}
    return Dataset(rows, states, identity, time.monotonic() - started, bad, full)


def open_store(config: TrainConfig) -> StoredRows:
    """The rows of the prepared store that the recipe names; nothing is made here.

    Raises:
        ConfigError: no finished store there, or it was made with another tokenizer than the target's.
        DataError: nothing in it fits a row.
    """
    return StoredRows(named_store(config), config.data.row_tokens, config.seed, config.data.long)


def _continuations(
    config: TrainConfig, target: Target, tokenizer: Any, say: Say, beat: Beat
) -> tuple[Rows, States]:
    data = config.data
    drawn = texts.draw_prompts(tokenizer, data.rows, data.prompt_tokens, False, config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    store = _Store(target, data.rows, data.row_tokens, final=config.objective.labels != "data")
    tokens: list[Tensor] = []
    done, started, latest = 0, time.monotonic(), 0.0  # rows; when we began; what the latest batch took
    while done < data.rows:
        before = time.monotonic()
        # A batch cannot end early, so the next is begun only if it should fit the time.
        if done and data.budget_s is not None and before - started + latest > data.budget_s:
            say(f"data: {done:,} of {data.rows:,} rows in the {data.budget_s:.0f} s allowed")
            break
        batch = drawn[done : done + data.batch].to(target.device)
        written = write(
            target,
            batch,
            data.row_tokens,
            greedy_rows=round(len(batch) * data.greedy_share),
            temperature=data.temperature,
            generator=generator,
            keep_final=store.final is not None,
            dtype=store.taps.dtype,
            beat=beat,
        )
        tokens.append(written.tokens)
        store.put(done, States(written.taps, written.final))
        done += len(batch)
        now = time.monotonic()
        latest = now - before
        say(f"data: {done:,} of {data.rows:,} rows, {done * data.row_tokens / (now - started):,.0f} tokens/s")
    rows = from_tokens(torch.cat(tokens), data.prompt_tokens, end_ids(target.config))
    return rows, store.states(done)


@torch.no_grad()
def _read_once(config: TrainConfig, target: Target, rows: Rows, beat: Beat) -> States:
    store = _Store(target, len(rows), config.data.row_tokens, final=config.objective.labels != "data")
    for start in range(0, len(rows), config.batch_rows):
        here = rows[slice(start, start + config.batch_rows)]
        part, again = here.to(target.device), len(here) == config.batch_rows
        full, single = store.final is not None, is_single(here.documents)
        store.put(start, target.states(part.tokens, part.positions, part.documents, full, single, again))
        beat()
    return store.states(len(rows))


class _Store:
    """States of rows in host memory, written in place: they are the largest thing of a small run."""

    def __init__(self, target: Target, rows: int, row_tokens: int, final: bool) -> None:
        # Half of float32's memory; the drafter's products round to bfloat16 anyway wherever they may.
        dtype = torch.bfloat16 if target.dtype == torch.float32 else target.dtype
        hidden = target.hidden_size
        self.taps = torch.empty(rows, row_tokens, len(target.taps) * hidden, dtype=dtype)
        self.final = torch.empty(rows, row_tokens, hidden, dtype=dtype) if final else None

    def put(self, start: int, states: States) -> None:
        part = slice(start, start + len(states.taps))
        self.taps[part] = states.taps
        if self.final is not None and states.final is not None:
            self.final[part] = states.final

    def states(self, rows: int) -> States:
        return States(self.taps[:rows], None if self.final is None else self.final[:rows])


def drop_bad_rows(rows: Rows, states: States, allowed: int) -> tuple[Rows, States, list[int]]:
    """Take rows with non-finite states out of training: unsupervised, their states set to zero in place.

    Raises:
        DataError: more than `allowed`, or all.
    """
    finite = torch.ones(len(rows), dtype=torch.bool)
    for part in (states.taps, states.final):
        if part is not None:  # a few rows at a time: the check should not cost a copy of everything
            finite &= torch.cat([few.isfinite().flatten(1).all(1) for few in part.split(64)])
    bad = newly_bad((~finite).nonzero()[:, 0].tolist(), [], allowed, len(rows))
    for part in (states.taps, states.final):
        if part is not None and bad:
            part[bad] = 0
    supervised = rows.supervised & finite[:, None]
    return Rows(rows.tokens, rows.documents, rows.positions, supervised), states, bad
