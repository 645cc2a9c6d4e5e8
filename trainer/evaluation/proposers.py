"""Who proposes tokens while decoding: the drafter with its context cache, or the text itself.

Rows R, block size B, tokens T, taps K, hidden H, vocabulary V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.evaluation.sampling import Draft, Way
from trainer.model.cache import DraftContext
from trainer.model.drafter import Drafter
from trainer.model.target import Target


class Proposer(Protocol):
    def read(self, taps: Tensor, positions: Tensor, alive: Tensor) -> None:
        """The target has read tokens: its taps [R, T, K * H], their positions and which were kept [R, T]."""

    def propose(self, way: Way, anchors: Tensor, start: Tensor, texts: Sequence[Sequence[int]]) -> Draft:
        """What follows the `anchors` [R]: the last tokens of `texts`, at positions `start` [R]."""


class BatchDrafter:
    """The drafter over a batch of sequences with its context cache."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter, target
        self.context = DraftContext(len(drafter.layers))
        self.windows = [drafter.config.window(layer) for layer in range(len(drafter.layers))]

    def read(self, taps: Tensor, positions: Tensor, alive: Tensor) -> None:
        new = self.drafter.context_keys_values(taps.to(self.drafter.fc.weight.dtype), positions)
        self.context.append(new, positions, alive)

    def logits(self, anchors: Tensor, start: Tensor) -> Tensor:
        """[R, B-1, V] of the slots after `anchors` [R], whose positions are `start` [R]."""
        size = self.drafter.config.block_size
        tokens = torch.full((len(anchors), size), self.drafter.config.mask_token_id, device=anchors.device)
        tokens[:, 0] = anchors
        positions = start[:, None] + torch.arange(size, device=anchors.device)
        x = self.target.embedding(tokens).to(self.drafter.fc.weight.dtype)
        masks = {window: self.context.mask(start, size, window) for window in set(self.windows)}
        hidden = self.drafter(
            x, positions, self.context.keys_values(), [masks[window] for window in self.windows]
        )
        return self.target.logits(hidden[:, 1:].to(self.target.dtype))

    def propose(self, way: Way, anchors: Tensor, start: Tensor, texts: Sequence[Sequence[int]]) -> Draft:
        offsets = torch.arange(1, self.drafter.config.block_size, device=start.device)
        return way.draft(self.logits(anchors, start), start[:, None] + offsets)


class PromptLookup:
    """Prompt lookup decoding: what followed the latest earlier occurrence of a text's last tokens."""

    def __init__(self, longest: int, count: int) -> None:
        """longest: tokens of the n-gram that is looked for first; count: tokens to propose."""
        self.longest, self.count = longest, count

    def read(self, taps: Tensor, positions: Tensor, alive: Tensor) -> None:
        """It needs no states."""

    def propose(self, way: Way, anchors: Tensor, start: Tensor, texts: Sequence[Sequence[int]]) -> Draft:
        found = [lookup_draft(text, self.longest, self.count) for text in texts]
        most = max(len(tokens) for tokens in found)
        padded = [tokens + [0] * (most - len(tokens)) for tokens in found]
        counts = torch.tensor([len(tokens) for tokens in found], device=anchors.device)
        return Draft(
            torch.tensor(padded, dtype=torch.int64, device=anchors.device).view(len(found), most), counts
        )


def lookup_draft(text: Sequence[int], longest: int, count: int) -> list[int]:
    """Prompt-lookup drafting: what followed the latest earlier occurrence of the text's last tokens.

    The longest n-gram from `longest` down to one token that occurred before decides; up to `count` tokens.
    """
    for size in range(min(longest, len(text) - 1), 0, -1):
        ending = tuple(text[-size:])
        for start in range(len(text) - size - 1, -1, -1):
            if text[start] == ending[0] and tuple(text[start : start + size]) == ending:
                return list(text[start + size : start + size + count])
    return []
