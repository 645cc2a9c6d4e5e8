"""Rows that the target writes itself: short prompts, continued greedily or sampled, with the taps caught on
the way.

A drafter has to foretell the target, so it learns from the target's own text (SpecForge and speculators
regenerate their responses for the same reason). The taps of a row come out of the very forward passes that
wrote it: no second pass over the data is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model.cache import target_cache
from trainer.model.target import Target


@dataclass(frozen=True)
class Written:
    """R rows of S tokens and the target's states of them."""

    tokens: Tensor  # [R, S]
    taps: Tensor  # [R, S, K * H]
    final: Tensor | None  # [R, S, H], when labels come from the target


@torch.no_grad()
def write(
    target: Target,
    prompts: Tensor,
    row_tokens: int,
    greedy_rows: int,
    temperature: float,
    generator: torch.Generator,
    keep_final: bool,
    dtype: torch.dtype,
    beat: Callable[[], None] = lambda: None,
) -> Written:
    """Continue prompts [R, P] to rows of `row_tokens`.

    Args:
        greedy_rows: the first so many rows are greedy, the others sampled at `temperature`.
        dtype: of the states that are kept.
    """
    rows, size = prompts.shape
    cache = target_cache(target.layer_count)
    taps = torch.empty(rows, row_tokens, len(target.taps) * target.hidden_size, dtype=dtype)
    final = torch.empty(rows, row_tokens, target.hidden_size, dtype=dtype) if keep_final else None
    tokens = torch.empty(rows, row_tokens, dtype=torch.int64)
    tokens[:, :size] = prompts
    fresh = prompts
    for end in range(size, row_tokens + 1):
        place = slice(end - fresh.shape[1], end)
        positions = torch.arange(place.start, end, device=prompts.device).expand_as(fresh)
        states = target.run(fresh, positions, cache=cache, full=True)
        assert states.final is not None
        taps[:, place] = states.taps.to("cpu", dtype)
        if final is not None:
            final[:, place] = states.final.to("cpu", dtype)
        if end < row_tokens:
            logits = target.logits(states.final[:, -1]).float()
            best = logits[:greedy_rows].argmax(-1)
            drawn = sample(logits[greedy_rows:] / temperature, generator)
            fresh = torch.cat((best, drawn))[:, None]
            tokens[:, end : end + 1] = fresh.cpu()
        beat()
    return Written(tokens, taps, final)


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One draw from softmax(logits) for each row, [R, V] -> [R].

    By the inverse of the cumulative distribution: it takes one random number a row, not one a word.
    """
    return pick(logits, torch.rand(len(logits), 1, generator=generator).to(logits.device))


def pick(logits: Tensor, uniform: Tensor) -> Tensor:
    """Where uniform numbers [R, 1] in [0, 1) fall in the cumulative distributions of logits [R, V] -> [R]."""
    reach = logits.softmax(-1).cumsum(-1)
    found = torch.searchsorted(reach, uniform * reach[:, -1:], right=True)
    return found.clamp(max=logits.shape[-1] - 1)[:, 0]
