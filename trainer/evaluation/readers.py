"""The target while decoding: it reads tokens after what it has read, and takes back those that were rejected.

Three ways, and `reader` picks the fastest that is right for an architecture:

- all layers attend to the whole past: one cache for the batch; what all rows rejected is cut off, what only
  some rejected is masked (rows of a batch accept different numbers of tokens);
- layers that slide or carry a recurrent state, which cannot be cut: each row has a cache of its own, a
  block is read on a copy of it, and after a rejection the kept tokens are read once more on the original;
- where transformers cannot continue such a cache by several tokens at once (`continues` tries it out),
  every pass reads every row from its beginning: right for every architecture, and slow.

Rows R, tokens T, hidden H, taps K.
"""

from __future__ import annotations

import copy
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from trainer.model.cache import target_cache
from trainer.model.plain_states import allowed, far, plain_states
from trainer.model.target import Target
from trainer.shortage import is_shortage

_CONTINUES: WeakKeyDictionary[Target, bool] = WeakKeyDictionary()  # tried once for each target
PROBE_TOKENS = 12


class Reader(Protocol):
    def read(self, tokens: Tensor, positions: Tensor, trial: bool = False) -> tuple[Tensor, Tensor]:
        """Append tokens [R, T]: what the head reads [R, T, H], and the taps [R, T, K * H].

        trial: some may be taken back; `keep` follows.
        """

    def keep(self, count: int, kept: Tensor) -> None:
        """Take back all but the first `kept` [R] of the `count` tokens that were read on trial."""


class BatchTarget:
    """One cache for all rows, rejected tokens cut off or masked."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.cache = target_cache(target.layer_count)
        self.alive = torch.empty(0, 0, dtype=torch.bool)

    def read(self, tokens: Tensor, positions: Tensor, trial: bool = False) -> tuple[Tensor, Tensor]:
        rows, count = tokens.shape
        fresh = torch.ones(rows, count, dtype=torch.bool, device=tokens.device)
        causal = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        mask = None
        if self.alive.numel():
            past = self.alive[:, None, :].expand(rows, count, -1)
            # One token that sees all of the past needs no mask, and the attention kernel is faster without
            # one.
            if count > 1 or not bool(self.alive.all()):
                mask = torch.cat((past, causal.expand(rows, -1, -1)), dim=2)[:, None]
            self.alive = torch.cat((self.alive, fresh), dim=1)
        else:
            self.alive = fresh
        states = self.target.run(tokens, positions, mask=mask, cache=self.cache, full=True)
        assert states.final is not None
        return states.final, states.taps

    def keep(self, count: int, kept: Tensor) -> None:
        self.alive[:, -count:] = torch.arange(count, device=kept.device) < kept[:, None]
        rejected = count - int(kept.max())
        if rejected:
            self.alive = self.alive[:, :-rejected]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :-rejected], layer.values[:, :, :-rejected]


class RollbackTarget:
    """A cache for each row; a block is read on a copy of it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.caches: list[Cache] = []
        self.trials: list[Cache] = []
        self.block: tuple[Tensor, Tensor] | None = None

    def read(self, tokens: Tensor, positions: Tensor, trial: bool = False) -> tuple[Tensor, Tensor]:
        if not self.caches:
            self.caches = [DynamicCache(config=self.target.config) for _ in tokens]
        caches = self.caches
        if trial:
            caches = self.trials = [copy.deepcopy(cache) for cache in self.caches]
            self.block = tokens, positions
        parts = [
            self.target.run(tokens[row : row + 1], positions[row : row + 1], cache=cache, full=True)
            for row, cache in enumerate(caches)
        ]
        finals = [part.final for part in parts if part.final is not None]
        return torch.cat(finals), torch.cat([part.taps for part in parts])

    def keep(self, count: int, kept: Tensor) -> None:
        assert self.block is not None and self.block[0].shape[1] == count
        tokens, positions = self.block
        for row, number in enumerate(kept.tolist()):
            if number == count:
                self.caches[row] = self.trials[row]
            elif number:
                part = slice(row, row + 1), slice(0, number)
                self.target.run(tokens[part], positions[part], cache=self.caches[row], full=True)
        self.trials, self.block = [], None


class RereadTarget:
    """No cache: each pass reads every row from its beginning."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.rows: list[Tensor] = []

    def read(self, tokens: Tensor, positions: Tensor, trial: bool = False) -> tuple[Tensor, Tensor]:
        """As Reader.read; positions follow from what was kept."""
        past = self.rows or [tokens.new_empty(0)] * len(tokens)
        self.rows = [torch.cat(pair) for pair in zip(past, tokens, strict=True)]
        finals, taps = [], []
        for row in self.rows:
            states = self.target.run(row[None], torch.arange(len(row), device=row.device)[None], full=True)
            assert states.final is not None
            finals.append(states.final[0, -tokens.shape[1] :])
            taps.append(states.taps[0, -tokens.shape[1] :])
        return torch.stack(finals), torch.stack(taps)

    def keep(self, count: int, kept: Tensor) -> None:
        self.rows = [
            row[: len(row) - count + number] for row, number in zip(self.rows, kept.tolist(), strict=True)
        ]


@torch.no_grad()
def continues(target: Target) -> bool:
    """Whether this architecture, in the transformers that is installed, reads on from a copied cache.

    Half of a text, a block of which two tokens are kept, and the rest, against the whole text at once.
    """
    tokens = torch.arange(PROBE_TOKENS, device=target.device)[None] % target.vocabulary
    positions = torch.arange(PROBE_TOKENS, device=target.device)[None]
    half, end = PROBE_TOKENS // 2, PROBE_TOKENS - 2
    model = RollbackTarget(target)
    whole = target.run(tokens, positions, full=True)
    assert whole.final is not None
    try:
        model.read(tokens[:, :half], positions[:, :half])
        model.read(tokens[:, half:end], positions[:, half:end], trial=True)
        model.keep(end - half, torch.tensor([2]))
        final, taps = model.read(tokens[:, half + 2 :], positions[:, half + 2 :], trial=True)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if is_shortage(error):  # says nothing of the architecture
            raise
        return False
    most = allowed(far(whole.final, plain_states(target, tokens, positions)[-1]))
    pairs = ((final, whole.final[:, half + 2 :]), (taps, whole.taps[:, half + 2 :]))
    return all(far(mine, wanted) <= most for mine, wanted in pairs)


def reader(target: Target) -> Reader:
    """The fastest way to decode with this target that is right."""
    if set(target.layer_types) == {"full_attention"}:
        return BatchTarget(target)
    if target not in _CONTINUES:
        _CONTINUES[target] = continues(target)
    return RollbackTarget(target) if _CONTINUES[target] else RereadTarget(target)
