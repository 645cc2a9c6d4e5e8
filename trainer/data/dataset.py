"""The rows of a run, with the target's states of them where those are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.config import TrainConfig
from trainer.data import prompts as texts
from trainer.data.continuations import Written, write
from trainer.data.packing import Rows, from_tokens
from trainer.errors import DataError
from trainer.model.target import States, Target
from trainer.step import Batch, without_bad_rows

Say = Callable[[str], None]
Beat = Callable[[], None]


@dataclass
class Dataset:
    """R rows. `states` is None when the target reads them anew at every step."""

    rows: Rows
    states: States | None
    identity: dict[str, Any]
    seconds: float
    bad_rows: list[int]
    full: bool = False  # the target's final states are needed too, for labels

    def batch(self, index: Tensor, target: Target) -> tuple[Batch, Tensor | None]:
        """The rows at `index` on the target's device with their states; which of them are bad, if not known
        yet.
        """
        rows = self.rows[index].to(target.device)
        if self.states is None:
            states = target.states(rows.tokens, rows.positions, rows.documents, full=self.full)
            return without_bad_rows(rows, states)
        taps, final = self.states.taps[index].to(target.device), self.states.final
        return Batch(rows, States(taps, None if final is None else final[index].to(target.device))), None


def build(config: TrainConfig, target: Target, tokenizer: Any, say: Say, beat: Beat) -> Dataset:
    """Make the run's rows.

    Raises:
        DataError: too many rows have non-finite states, or there is no text.
    """
    started = time.monotonic()
    full = config.objective.labels != "data"
    if config.data.continuations:
        states: States | None
        rows, states = _continuations(config, target, tokenizer, say, beat)
    else:
        end_id = target.config.eos_token_id if isinstance(target.config.eos_token_id, int) else 0
        rows = texts.packed_text(tokenizer, config.data.rows, config.data.row_tokens, end_id, config.seed)
        states = _read_once(config, target, rows, beat) if config.data.states == "cached" else None
    bad: list[int] = []
    if states is not None:
        rows, states, bad = drop_bad_rows(rows, states, config.data.max_bad_rows)
    identity = {**texts.identity(held_out=False), "rows": len(rows), "row_tokens": config.data.row_tokens}
    return Dataset(rows, states, identity, time.monotonic() - started, bad, full)


def _state_dtype(target: Target) -> torch.dtype:
    # Half the memory; the drafter's products round to bfloat16 anyway wherever autocast is on.
    return torch.bfloat16 if target.dtype == torch.float32 else target.dtype


def _continuations(
    config: TrainConfig, target: Target, tokenizer: Any, say: Say, beat: Beat
) -> tuple[Rows, States]:
    data = config.data
    drawn = texts.draw_prompts(tokenizer, data.rows, data.prompt_tokens, False, config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    parts: list[Written] = []
    started, latest = time.monotonic(), 0.0  # when we began; what the latest batch took
    for start in range(0, data.rows, data.batch):
        before = time.monotonic()
        # A batch cannot end early, so the next is begun only if it should fit the time.
        if parts and data.budget_s is not None and before - started + latest > data.budget_s:
            say(f"data: {start:,} of {data.rows:,} rows in the {data.budget_s:.0f} s allowed")
            break
        batch = drawn[start : start + data.batch].to(target.device)
        parts.append(
            write(
                target,
                batch,
                data.row_tokens,
                greedy_rows=round(len(batch) * data.greedy_share),
                temperature=data.temperature,
                generator=generator,
                keep_final=config.objective.labels != "data",
                dtype=_state_dtype(target),
                beat=beat,
            )
        )
        now = time.monotonic()
        latest = now - before
        done = start + len(batch)
        say(f"data: {done:,} of {data.rows:,} rows, {done * data.row_tokens / (now - started):,.0f} tokens/s")
    tokens = torch.cat([part.tokens for part in parts])
    finals = [part.final for part in parts if part.final is not None]
    states = States(torch.cat([part.taps for part in parts]), torch.cat(finals) if finals else None)
    return from_tokens(tokens, supervised_from=data.prompt_tokens), states


@torch.no_grad()
def _read_once(config: TrainConfig, target: Target, rows: Rows, beat: Beat) -> States:
    full = config.objective.labels != "data"
    taps, finals = [], []
    for start in range(0, len(rows), config.batch_rows):
        part = rows[slice(start, start + config.batch_rows)].to(target.device)
        states = target.states(part.tokens, part.positions, part.documents, full=full)
        taps.append(states.taps.to("cpu", _state_dtype(target)))
        if states.final is not None:
            finals.append(states.final.to("cpu", _state_dtype(target)))
        beat()
    return States(torch.cat(taps), torch.cat(finals) if finals else None)


def drop_bad_rows(rows: Rows, states: States, allowed: int) -> tuple[Rows, States, list[int]]:
    """Take rows with non-finite states out of training: unsupervised, their states zero, all shapes as
    before.

    Raises:
        DataError: more than `allowed`.
    """
    batch, flags = without_bad_rows(rows, states)
    bad = flags.nonzero()[:, 0].tolist()
    if len(bad) > allowed:
        raise DataError(
            f"{len(bad)} of {len(rows)} rows have non-finite hidden states (rows {_some(bad)})",
            where="train.data.max_bad_rows",
            next="check the target's weights and dtype; the limit is for accidents, not for a broken target",
        )
    return batch.rows, batch.states, bad


def _some(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    return f"{shown}, ..." if len(numbers) > 5 else shown
