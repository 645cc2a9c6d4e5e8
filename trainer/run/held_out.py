"""Prefix-match acceptance length: what the training pass says of fixed blocks of held-out text.

The text is the target's own greedy continuation of held-out prompts, a block starts at each of its first
tokens, and the figure is 1 + the slots that are right before the first wrong one, as the mean over blocks. It
costs one forward pass. From the same blocks follows what decoding should accept: it goes from block to block
by what each gets right. When real decoding of the same prompts gives much less, the training pass sees what
the drafter will not have when it drafts, and fine figures of training mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.data.packing import from_tokens
from trainer.model.target import Target
from trainer.training.objective import make_blocks
from trainer.training.step import DrafterStep

SHOWS_FROM = 1.3  # promised lengths below this show nothing
# Of the drafted tokens that are promised, real decoding must accept; rounding costs a few %
LEAST_SHARE = 0.7


@dataclass(frozen=True)
class Matched:
    """What the training pass says of the held-out blocks."""

    prefix: float  # acceptance length as the mean over all blocks
    promised: float  # as decoding would go through the text, tokens over passes


class HeldOut:
    """Fixed rows with their states, and fixed blocks in them."""

    def __init__(
        self, target: Target, prompts: Tensor, texts: Sequence[Sequence[int]], first_tokens: int, size: int
    ) -> None:
        """
        Args:
            prompts: [P, T].
            texts: the target's own greedy continuation of each prompt, its end token included.
            first_tokens: blocks start at the first so many tokens of each text.
            size: of a block.
        """
        start = prompts.shape[1]
        lines = [[*prompt, *text] for prompt, text in zip(prompts.tolist(), texts, strict=True)]
        tokens = torch.zeros(len(lines), start + first_tokens + size - 1, dtype=torch.int64)
        lengths = torch.tensor([min(len(line), tokens.shape[1]) for line in lines])
        for row, (line, length) in enumerate(zip(lines, lengths.tolist(), strict=True)):
            tokens[row, :length] = torch.tensor(line[:length])
        # What follows a text is read after it, so changes nothing.
        rows = from_tokens(tokens.to(target.device), 0)
        anchors = torch.arange(start, start + first_tokens).expand(len(lines), -1)
        # Whole blocks only: one that the text's end cuts short would count as a miss.
        keep = (anchors + size <= lengths[:, None]).to(target.device)
        self.size, self.anchors, self.keep = size, torch.where(keep, anchors.to(target.device), 0), keep
        states = target.states(rows.tokens, rows.positions, rows.documents, single=True, again=False)
        self.batch = Batch(rows, states)

    @torch.no_grad()
    def match(self, step: DrafterStep) -> Matched:
        """The figures for the drafter as it is; read from the device, so for now and then."""
        mask_token_id = step.drafter.config.mask_token_id
        blocks = make_blocks(self.batch.rows, self.anchors, self.keep, self.size, math.inf, mask_token_id)
        hidden = step.hidden(self.batch, blocks).unflatten(0, self.anchors.shape)  # [P, N, B-1, H]
        lengths: list[list[int]] = []  # of each text's whole blocks
        for row in range(len(hidden)):  # one row's logits at a time
            hits = (hidden[row] @ step.head.T).argmax(-1) == blocks.labels[row]
            found = 1 + hits.long().cumprod(-1).sum(-1)
            lengths.append(found[self.keep[row]].tolist())
        emitted = [each for line in lengths for each in walk(line)]
        every = [each for line in lengths for each in line]
        return Matched(sum(every) / max(1, len(every)), sum(emitted) / max(1, len(emitted)))


def walk(lengths: Sequence[int]) -> list[int]:
    """The tokens that each pass of decoding emits, when the block at token k is worth lengths[k] tokens."""
    emitted, place = [], 0
    while place < len(lengths):
        emitted.append(lengths[place])
        place += lengths[place]
    return emitted


def leak(promised: float, real: float) -> str | None:
    """What to say when training promises what decoding does not hold; None when all is well."""
    if promised < SHOWS_FROM or real - 1 >= LEAST_SHARE * (promised - 1):
        return None
    return (
        f"the training pass promises an acceptance length of {promised:.2f}, real decoding gives {real:.2f}: "
        "in training the drafter sees what it does not have when it drafts (the mask, or the taps' "
        "positions); trust real decoding"
    )
