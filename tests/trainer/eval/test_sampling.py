"""Speculative sampling writes the target's own distribution, whatever is proposed: chi-square over whole
texts.

The target is a Markov chain over four tokens, so the probability of every text is a product of table entries.

Run: python -m pytest tests/trainer/eval/test_sampling.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.evaluation import decode
from trainer.evaluation.decode import plain, speculate
from trainer.evaluation.proposers import PromptLookup
from trainer.evaluation.sampling import Draft, Rejection, Way

WORDS, TOKENS, ROWS = 4, 3, 20_000
TEMPERATURE = 0.8
# What a text's statistic stays below with probability 0.999: 4 * 4 * 4 texts have 63 degrees of freedom.
CRITICAL = 103.4


def table(seed: int) -> Tensor:
    """Logits of the next token after each token."""
    return torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed))


class Chain:
    """The target, and its reader: a token's state is the token, one-hot."""

    def __init__(self) -> None:
        self.table = table(1)

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.table

    def read(self, tokens: Tensor, positions: Tensor, trial: bool = False) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.one_hot(tokens, WORDS).float(), torch.zeros(*tokens.shape, 1)

    def keep(self, count: int, kept: Tensor) -> None:
        pass


class Guess:
    """A proposer with a table of its own: each of its tokens follows the anchor, as if the others were not
    there. `sharp` makes it almost certain of what the target rarely says."""

    def __init__(self, sharp: float) -> None:
        self.table = sharp * table(2)

    def read(self, taps: Tensor, positions: Tensor, alive: Tensor) -> None:
        pass

    def propose(self, way: Way, anchors: Tensor, start: Tensor, texts: Sequence[Sequence[int]]) -> Draft:
        logits = self.table[anchors][:, None].expand(-1, 2, -1)
        return way.draft(logits, start[:, None] + torch.arange(1, 3))


class Stutter:
    """A certain proposer: the anchor again; for every third text nothing at all."""

    def read(self, taps: Tensor, positions: Tensor, alive: Tensor) -> None:
        pass

    def propose(self, way: Way, anchors: Tensor, start: Tensor, texts: Sequence[Sequence[int]]) -> Draft:
        counts = torch.arange(len(anchors)) % 3
        return Draft(anchors[:, None].expand(-1, 2), counts)


def statistic(texts: Tensor) -> float:
    """Chi-square of the first TOKENS tokens of many texts, all after the prompt's token 0."""
    p = (Chain().table / TEMPERATURE).softmax(-1)
    wanted = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten() * len(texts)
    found = torch.bincount((texts * torch.tensor([16, 4, 1])).sum(1), minlength=WORDS**3)
    assert wanted.min() > 5  # the test's own condition
    return float(((found - wanted) ** 2 / wanted).sum())


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    chain = Chain()
    monkeypatch.setattr(decode, "reader", lambda target: chain)
    return chain


def written(target: Any, proposer: Any, seed: int) -> tuple[Tensor, float]:
    prompts = torch.zeros(ROWS, 1, dtype=torch.int64)
    way = Rejection(TEMPERATURE, seed, torch.device("cpu"))
    outputs = speculate(target, proposer, prompts, TOKENS, way)
    passes = sum(len(output.emitted) for output in outputs)
    gained = sum(sum(output.emitted) for output in outputs)
    return torch.tensor([output.tokens[:TOKENS] for output in outputs]), gained / passes


@pytest.mark.parametrize("sharp", [0.0, 1.5, 6.0])
@pytest.mark.parametrize("seed", [3, 4])
def test_texts_are_distributed_as_the_targets_own(sharp: float, seed: int, target: Any) -> None:
    texts, acceptance = written(target, Guess(sharp), seed)
    assert statistic(texts) < CRITICAL
    assert 1.1 < acceptance < 2.9  # some were kept, some were not


def test_what_is_certain_is_kept_as_often_as_the_target_says_it(target: Any) -> None:
    texts, acceptance = written(target, Stutter(), 5)
    assert statistic(texts) < CRITICAL and acceptance > 1.05


def test_prompt_lookup_too(target: Any) -> None:
    texts, acceptance = written(target, PromptLookup(2, 3), 6)
    assert statistic(texts) < CRITICAL and acceptance > 1.05


def test_plain_sampling_is_the_control(target: Any) -> None:
    prompts = torch.zeros(ROWS, 1, dtype=torch.int64)
    way = Rejection(TEMPERATURE, 7, torch.device("cpu"))
    outputs = plain(target, prompts, TOKENS, way.choose)
    assert statistic(torch.tensor([output.tokens for output in outputs])) < CRITICAL


def test_the_statistic_sees_a_wrong_rule(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's probabilities without its temperature: a usual mistake."""
    right = Rejection.verify

    def wrong(self: Rejection, draft: Draft, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        assert draft.probabilities is not None
        colder = (TEMPERATURE * draft.probabilities.log()).softmax(-1)
        return right(self, Draft(draft.tokens, draft.count, colder), logits, positions)

    monkeypatch.setattr(Rejection, "verify", wrong)
    assert statistic(written(target, Guess(1.5), 3)[0]) > 2 * CRITICAL


def test_the_same_distribution_is_always_accepted(target: Any) -> None:
    """p = q to the last bit: the whole draft is kept, and rounding leaves nothing to refuse."""
    way = Rejection(TEMPERATURE, 1, torch.device("cpu"))
    logits = torch.randn(500, 3, WORDS, generator=torch.Generator().manual_seed(1))
    draft = way.draft(logits[:, :2], torch.zeros(500, 2))
    kept, following = way.verify(draft, logits, torch.zeros(500, 3))
    assert kept.tolist() == [2] * 500
    assert set(following.tolist()) == set(range(WORDS))
