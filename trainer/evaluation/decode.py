"""Decoding many prompts at once: the target alone, and block-speculatively with a proposer.

Rows R, block size B, drafted tokens D, vocabulary V.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.evaluation.proposers import BatchDrafter, Proposer
from trainer.evaluation.readers import reader
from trainer.evaluation.sampling import Choose, Matching, Way
from trainer.model.drafter import Drafter
from trainer.model.target import Target

Beat = Callable[[], None]


@dataclass
class Output:
    """One prompt's decoding, up to and with its end token if there is one."""

    tokens: list[int]  # what follows the prompt; the first comes from the prompt's own forward pass
    emitted: list[int] = field(default_factory=list)  # tokens gained by each verification forward pass
    accepted: list[int] = field(default_factory=list)  # of them, drafted ones
    ended: bool = False

    def take(self, tokens: list[int], ends: Collection[int]) -> None:
        """Append what one pass has emitted: drafted tokens, and one of the target's own at last."""
        drafted = len(tokens) - 1
        for place, token in enumerate(tokens):
            if token in ends:
                tokens, self.ended = tokens[: place + 1], True
                break
        self.tokens += tokens
        self.emitted.append(len(tokens))
        self.accepted.append(min(drafted, len(tokens)))

    def wants(self, new_tokens: int) -> bool:
        return not self.ended and len(self.tokens) < new_tokens


def first(token: int, ends: Collection[int]) -> Output:
    """The start of an output: the token that the prompt's own forward pass gives."""
    return Output([token], ended=token in ends)


@torch.no_grad()
def plain(
    target: Target,
    prompts: Tensor,
    new_tokens: int,
    choose: Choose,
    ends: Collection[int] = (),
    beat: Beat = lambda: None,
    prefilled: Beat = lambda: None,
) -> list[Output]:
    """The target alone, one token a forward pass. prompts [R, P]; outputs of `new_tokens` tokens or ended.

    prefilled: called once the prompts are read and their first tokens chosen.
    """
    rows, size = prompts.shape
    model = reader(target)
    positions = torch.arange(size, device=prompts.device).expand(rows, size)
    final, _ = model.read(prompts, positions)
    position = positions[:, -1:] + 1
    token = choose(target.logits(final[:, -1:]), position)
    outputs = [first(one, ends) for one in token[:, 0].tolist()]
    prefilled()
    while any(output.wants(new_tokens) for output in outputs):
        final, _ = model.read(token, position)
        position = position + 1
        token = choose(target.logits(final), position)
        for output, one in zip(outputs, token[:, 0].tolist(), strict=True):
            if output.wants(new_tokens):
                output.tokens.append(one)
                output.ended = one in ends
        beat()
    return outputs


@torch.no_grad()
def speculate(
    target: Target,
    proposer: Proposer,
    prompts: Tensor,
    new_tokens: int,
    way: Way,
    ends: Collection[int] = (),
    beat: Beat = lambda: None,
    limit_s: float | None = None,
    prefilled: Beat = lambda: None,
) -> list[Output]:
    """Block-speculative decoding: the proposer drafts tokens, one target forward pass verifies them.

    Each output has at least `new_tokens` tokens or has ended; the last block's accepted tokens are all kept.
    After `limit_s` seconds outputs stay as long as they are.
    """
    rows, size = prompts.shape
    device = prompts.device
    model = reader(target)
    positions = torch.arange(size, device=device).expand(rows, size)
    final, taps = model.read(prompts, positions)
    proposer.read(taps, positions, torch.ones_like(positions, dtype=torch.bool))
    start = torch.full((rows,), size, device=device)
    anchor = way.choose(target.logits(final[:, -1:]), start[:, None])[:, 0]
    outputs = [first(token, ends) for token in anchor.tolist()]
    texts = [[*prompt, *output.tokens] for prompt, output in zip(prompts.tolist(), outputs, strict=True)]
    prefilled()
    latest = math.inf if limit_s is None else time.monotonic() + limit_s
    while any(output.wants(new_tokens) for output in outputs) and time.monotonic() < latest:
        draft = proposer.propose(way, anchor, start, texts)
        block = draft.tokens.shape[1] + 1
        offsets = torch.arange(block, device=device)
        place = start[:, None] + offsets  # [R, D + 1]
        tokens = torch.cat((anchor[:, None], draft.tokens), dim=1)
        final, taps = model.read(tokens, place, trial=True)
        accepted, following = way.verify(draft, target.logits(final), place + 1)
        going, drafted = [output.wants(new_tokens) for output in outputs], draft.tokens.tolist()
        for row, (count, last) in enumerate(zip(accepted.tolist(), following.tolist(), strict=True)):
            if going[row]:
                before = len(outputs[row].tokens)
                outputs[row].take([*drafted[row][:count], last], ends)
                texts[row] += outputs[row].tokens[before:]
        # A row that has enough stays in the batch; it is held at its place, and nothing of it is kept.
        moving = torch.tensor([output.wants(new_tokens) for output in outputs], device=device)
        kept = torch.where(moving, accepted + 1, 0)
        model.keep(block, kept)
        if most := int(kept.max()):
            proposer.read(taps[:, :most], place[:, :most], offsets[:most] < kept[:, None])
        anchor = torch.where(moving, following, anchor)
        start = start + kept
        beat()
    return outputs


def speculative(
    target: Target,
    drafter: Drafter,
    prompts: Tensor,
    new_tokens: int,
    choose: Choose,
    ends: Collection[int] = (),
    beat: Beat = lambda: None,
    limit_s: float | None = None,
) -> list[Output]:
    """`speculate` with the drafter, keeping what the target would have chosen itself."""
    proposer = BatchDrafter(drafter, target)
    return speculate(target, proposer, prompts, new_tokens, Matching(choose), ends, beat, limit_s)
