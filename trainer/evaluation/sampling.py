"""How tokens are chosen, by the target alone and speculatively, so that both give the same text or the same
distribution.

Two ways. *Matching*: a function of the logits chooses (greedily, or with noise that is fixed for each
position); drafted tokens are kept as long as they are the target's own choice. *Rejection sampling*
(Leviathan et al. 2023, arXiv 2211.17192): a drafted token x is kept with probability min(1, p(x) / q(x)), p
the target's distribution, q the drafter's; the first that is not is replaced by a draw from max(p - q, 0),
normalised. Each token is then distributed as p, whatever the drafter.

Rows R, drafted tokens D, vocabulary V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Chooses tokens: logits [R, T, V] and the positions [R, T] of the tokens to choose -> ids [R, T].
Choose = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens; row r's first `count[r]` of them."""

    tokens: Tensor  # [R, D]
    count: Tensor  # [R], at most D
    probabilities: Tensor | None = None  # [R, D, V] from which they were drawn; None: they were certain

    @property
    def proposed(self) -> Tensor:
        """[R, D] bool: which tokens are proposed at all."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.count[:, None]


class Way(Protocol):
    """A way of choosing."""

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The target's own tokens [R, T]."""

    def draft(self, logits: Tensor, positions: Tensor) -> Draft:
        """The drafter's tokens, from its logits [R, D, V]."""

    def verify(self, draft: Draft, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """How many drafted tokens are kept [R], and the token that follows them [R].

        Args:
            logits: [R, D + 1, V] the target's, after the token before the draft and after each drafted one.
            positions: [R, D + 1] of the tokens that they are for.
        """


class Matching:
    """Keep what the target would have chosen itself."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose

    def draft(self, logits: Tensor, positions: Tensor) -> Draft:
        tokens = self.choose(logits, positions)
        return Draft(tokens, torch.full((len(tokens),), tokens.shape[1], device=tokens.device))

    def verify(self, draft: Draft, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        chosen = self.choose(logits, positions)
        same = (draft.tokens == chosen[:, :-1]) & draft.proposed
        kept = same.long().cumprod(1).sum(1)
        return kept, chosen.gather(1, kept[:, None])[:, 0]


class Rejection:
    """Rejection sampling at a temperature; all luck comes from one generator."""

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device).manual_seed(seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        return (logits.float() / self.temperature).softmax(-1)

    def draw(self, probabilities: Tensor) -> Tensor:
        """One token of each distribution [..., V] -> [...]."""
        flat = probabilities.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probabilities.shape[:-1])

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        return self.draw(self.probabilities(logits))

    def draft(self, logits: Tensor, positions: Tensor) -> Draft:
        q = self.probabilities(logits)
        tokens = self.draw(q)
        return Draft(tokens, torch.full((len(tokens),), tokens.shape[1], device=tokens.device), q)

    def verify(self, draft: Draft, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        p = self.probabilities(logits)
        tokens = draft.tokens[:, :, None]
        wanted = p[:, :-1].gather(2, tokens)[:, :, 0]
        if draft.probabilities is None:
            given = torch.ones_like(wanted)
            q = torch.zeros_like(p).scatter_(2, torch.nn.functional.pad(tokens, (0, 0, 0, 1)), 1.0)
        else:
            given = draft.probabilities.gather(2, tokens)[:, :, 0]
            q = torch.nn.functional.pad(draft.probabilities, (0, 0, 0, 1))
        luck = torch.rand(given.shape, generator=self.generator, device=given.device)
        taken = (luck * given < wanted) & draft.proposed
        kept = taken.long().cumprod(1).sum(1)
        # After a whole draft nothing was refused: the token that follows it is a draw from p itself.
        refused = kept < draft.count
        at = kept[:, None, None].expand(-1, 1, p.shape[-1])
        p, q = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
        rest = torch.where(refused[:, None], (p - q).clamp(min=0), p)
        # p = q up to rounding leaves nothing; then p is as good.
        rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)
        return kept, self.draw(rest)


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
