"""Is speculative text the target's own? Token by token; and where it is not, how near the choice was.

In float32 it must be the same. In bfloat16 a pass over a block and passes over single tokens sum in
different orders, so where the best logits differ by no more than rounding, either may come out: a near-tie.
Anything else is a fault. After a text's first divergence the two are different texts: from there on each of
its tokens is held against what the target says after this very text, read in one pass.

Text length T, vocabulary V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trainer.evaluation.decode import Output
from trainer.model.target import Target

NEAR_TIE_SPACINGS = 4  # logits this many bfloat16 steps from the best may be chosen instead of it
PIECE = 256  # positions whose logits are in memory at once


@dataclass(frozen=True)
class Divergence:
    """A token that is not the target's own choice."""

    position: int  # in what follows the prompt
    expected: int  # the target's token
    said: int
    gap: float  # from the best logit to the lower one of the two
    allowed: float  # the largest gap that is a near-tie; 0: none is

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.allowed and self.allowed > 0


def spacing(value: float) -> float:
    """The distance of neighbouring bfloat16 numbers at this size: 8 significant bits."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - 7) if value else 0.0


@torch.no_grad()
def divergences(target: Target, prompt: Tensor, own: Output, output: Output, exact: bool) -> list[Divergence]:
    """Where `output` is not what the target says by itself.

    Args:
        prompt: [P].
        own: the target's own text, at least as long unless it ended.
        exact: no near-tie is allowed.
    """
    length = len(output.tokens)
    if output.tokens == own.tokens[:length]:
        return []
    same = zip(own.tokens, output.tokens, strict=False)
    first = next((n for n, (a, b) in enumerate(same) if a != b), len(own.tokens))
    found = []
    text = torch.cat((prompt, torch.tensor(output.tokens[:-1], dtype=prompt.dtype, device=prompt.device)))
    final = target.run(text[None], torch.arange(len(text), device=text.device)[None], full=True).final
    assert final is not None
    after = final[0, len(prompt) - 1 :]  # [T, H], after which each token is said
    for start, stop in pairwise([*range(first, length, PIECE), length]):
        logits = target.logits(after[start:stop]).float()
        best = logits.argmax(-1).tolist()
        for place in range(start, stop):
            said, row = output.tokens[place], logits[place - start]
            expected = best[place - start]
            if place == first and place < len(own.tokens):
                expected = own.tokens[place]
            if said != expected:
                top = float(row.max())
                gap = top - float(row[[expected, said]].min())
                allowed = 0.0 if exact else NEAR_TIE_SPACINGS * spacing(top)
                found.append(Divergence(place, expected, said, gap, allowed))
    return found
