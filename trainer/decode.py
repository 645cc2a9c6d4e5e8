"""Decoding many prompts at once: the target alone, and block-speculatively with a drafter.

Rows of a batch accept different numbers of tokens, so no cache is cropped: every forward pass appends its
tokens, and a mask hides those that were rejected. A target that does not attend to its whole past in every
layer (sliding windows, recurrent states) is read anew at each pass instead.

Rows R, block size B, vocabulary V.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.model.cache import DraftContext, target_cache
from trainer.model.drafter import Drafter
from trainer.model.target import Target

# Chooses tokens: logits [R, T, V] and the positions [R, T] of the tokens to choose -> ids [R, T].
Choose = Callable[[Tensor, Tensor], Tensor]
Beat = Callable[[], None]


def greedy(logits: Tensor, positions: Tensor) -> Tensor:
    return logits.argmax(-1)


class FixedNoise:
    """Sampling at a temperature that is a function of the logits: argmax(logits / T + one Gumbel row per
    position).

    The Gumbel-max trick samples exactly from softmax(logits / T); with the noise fixed, target and drafter
    share their luck, and speculative decoding can be compared with plain decoding token by token.
    """

    def __init__(
        self, temperature: float, vocabulary: int, longest: int, seed: int, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(longest, vocabulary, generator=generator).clamp_(min=1e-20)
        self.noise = (-torch.log(-torch.log(uniform))).to(device)
        self.temperature = temperature

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        return (logits / self.temperature + self.noise[positions]).argmax(-1)


class Halves:
    """Two ways of choosing in one batch: its first half by one, its second half by the other.

    A pass over a small batch costs little more than one over half of it.
    """

    def __init__(self, first: Choose, second: Choose) -> None:
        self.first, self.second = first, second

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        half = len(logits) // 2
        return torch.cat(
            (self.first(logits[:half], positions[:half]), self.second(logits[half:], positions[half:]))
        )


@dataclass
class Output:
    """One prompt's decoding, up to and with its end token if there is one."""

    tokens: list[int]  # what follows the prompt; the first comes from the prompt's own forward pass
    emitted: list[int] = field(default_factory=list)  # tokens gained by each verification forward pass
    ended: bool = False

    def take(self, tokens: list[int], end_id: int | None) -> None:
        """Append what one pass has emitted."""
        if end_id in tokens:
            tokens = tokens[: tokens.index(end_id) + 1]
            self.ended = True
        self.tokens += tokens
        self.emitted.append(len(tokens))

    def wants(self, new_tokens: int) -> bool:
        return not self.ended and len(self.tokens) < new_tokens


def first(token: int, end_id: int | None) -> Output:
    """The start of an output: the token that the prompt's own forward pass gives."""
    return Output([token], ended=token == end_id)


class BatchTarget:
    """The target over a batch of sequences, rejected tokens masked."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.cache = target_cache(target.layer_count)
        self.alive = torch.empty(0, 0, dtype=torch.bool)

    def read(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens [R, T]: what the head reads [R, T, H], and the taps [R, T, K * H]."""
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
        """Hide all but the first `kept` [R] of the last `count` tokens."""
        self.alive[:, -count:] = torch.arange(count, device=kept.device) < kept[:, None]


class RereadTarget:
    """The same, for targets whose layers slide or carry a state that cannot be taken back.

    Keeps no cache: each pass reads every row from its beginning. Right for every architecture, and slow.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.rows: list[Tensor] = []

    def read(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As BatchTarget.read; positions follow from what was kept."""
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


def reader(target: Target) -> BatchTarget | RereadTarget:
    """The fastest way to decode with this target."""
    return BatchTarget(target) if set(target.layer_types) == {"full_attention"} else RereadTarget(target)


@torch.no_grad()
def plain(
    target: Target,
    prompts: Tensor,
    new_tokens: int,
    choose: Choose,
    end_id: int | None = None,
    beat: Beat = lambda: None,
) -> list[Output]:
    """The target alone, one token a forward pass. prompts [R, P]; outputs of `new_tokens` tokens or ended."""
    rows, size = prompts.shape
    model = reader(target)
    positions = torch.arange(size, device=prompts.device).expand(rows, size)
    final, _ = model.read(prompts, positions)
    position = positions[:, -1:]
    chosen = []
    for _ in range(new_tokens):
        position = position + 1
        token = choose(target.logits(final[:, -1:]), position)
        chosen.append(token)
        if len(chosen) < new_tokens:
            final, _ = model.read(token, position)
        beat()
    outputs = []
    for head, *rest in torch.cat(chosen, dim=1).tolist():
        output = first(head, end_id)
        if not output.ended:
            output.take(rest, end_id)
        outputs.append(Output(output.tokens, ended=output.ended))  # one token a pass: nothing to count
    return outputs


class BatchDrafter:
    """The drafter over a batch of sequences with its context cache."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.target = drafter, target
        self.context = DraftContext(len(drafter.layers))
        self.windows = [drafter.config.window(layer) for layer in range(len(drafter.layers))]

    def read(self, taps: Tensor, positions: Tensor, alive: Tensor) -> None:
        """Add the target's states [R, T, K * H] to the context where alive [R, T]."""
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


@torch.no_grad()
def speculative(
    target: Target,
    drafter: Drafter,
    prompts: Tensor,
    new_tokens: int,
    choose: Choose,
    end_id: int | None = None,
    beat: Beat = lambda: None,
    limit_s: float | None = None,
) -> list[Output]:
    """Block-speculative decoding: the drafter proposes B-1 tokens, one target forward pass verifies them.

    Each output has at least `new_tokens` tokens or has ended; the last block's accepted tokens are all kept.
    After `limit_s` seconds outputs stay as long as they are.
    """
    rows, size = prompts.shape
    device, block = prompts.device, drafter.config.block_size
    model, draft = reader(target), BatchDrafter(drafter, target)
    positions = torch.arange(size, device=device).expand(rows, size)
    final, taps = model.read(prompts, positions)
    draft.read(taps, positions, torch.ones_like(positions, dtype=torch.bool))
    start = torch.full((rows,), size, device=device)
    anchor = choose(target.logits(final[:, -1:]), start[:, None])[:, 0]
    outputs = [first(token, end_id) for token in anchor.tolist()]
    offsets = torch.arange(block, device=device)
    latest = math.inf if limit_s is None else time.monotonic() + limit_s
    while any(output.wants(new_tokens) for output in outputs) and time.monotonic() < latest:
        place = start[:, None] + offsets  # [R, B]
        proposed = choose(draft.logits(anchor, start), place[:, 1:])
        tokens = torch.cat((anchor[:, None], proposed), dim=1)
        final, taps = model.read(tokens, place)
        chosen = choose(target.logits(final), place + 1)  # what the target itself says after each token
        accepted = (proposed == chosen[:, :-1]).long().cumprod(1).sum(1)
        for output, row, count in zip(outputs, chosen.tolist(), accepted.tolist(), strict=True):
            if output.wants(new_tokens):
                output.take(row[: count + 1], end_id)
        # A row that has enough stays in the batch; it is held at its place, and nothing of it is kept.
        going = torch.tensor([output.wants(new_tokens) for output in outputs], device=device)
        kept = torch.where(going, accepted + 1, 0)
        model.keep(block, kept)
        draft.read(taps, place, offsets < kept[:, None])
        anchor = torch.where(going, chosen.gather(1, accepted[:, None])[:, 0], anchor)
        start = start + kept
        beat()
    return outputs
