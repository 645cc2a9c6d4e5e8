"""Acceptance length by real decoding, and whether the output is exactly the target's own.

Acceptance length = tokens emitted / target verification forward passes, pooled over prompts, the prompts' own
pass excluded. Greedy text of a small model soon repeats itself, which flatters any drafter: the first tokens
and sampled text are measured too, and prompt-lookup decoding, which needs no drafter, stands beside it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.evaluation.decode import Beat, Output, plain, speculative
from trainer.evaluation.figures import acceptance, repeated_ngrams
from trainer.evaluation.proposers import lookup_draft
from trainer.evaluation.sampling import FixedNoise, Halves, greedy
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.model.target_files import end_ids
from trainer.sections import Evaluate

NOISE_SEED = 20_240_229  # fixed for ever: measurements of different runs share their luck


@dataclass(frozen=True)
class Figure:
    """One way of drafting, over all prompts."""

    acceptance_length: float
    first: float  # over the passes that begin within the first tokens
    histogram: dict[int, int] = field(default_factory=dict)  # tokens emitted by a pass -> passes
    equal: int = 0  # prompts whose text is the target's own, token by token
    prompts: int = 0
    tokens: int = 0  # of the texts that were compared

    @property
    def lossless(self) -> bool:
        return self.equal == self.prompts


@dataclass(frozen=True)
class Measurement:
    greedy: Figure
    sampled: Figure


def figure(outputs: Sequence[Output], own: Sequence[Output], first_tokens: int) -> Figure:
    """The figures of speculative `outputs` against the target's `own` texts, at least as long."""
    emitted = [output.emitted for output in outputs]
    equal = sum(
        output.tokens == reference.tokens[: len(output.tokens)]
        for output, reference in zip(outputs, own, strict=True)
    )
    histogram = Counter(count for counts in emitted for count in counts)
    return Figure(
        acceptance(emitted),
        acceptance(emitted, first_tokens),
        dict(sorted(histogram.items())),
        equal,
        len(own),
        sum(len(output.tokens) for output in outputs),
    )


def lookup(prompt: Sequence[int], own: Output, new_tokens: int, longest: int, block_size: int) -> Output:
    """Prompt-lookup decoding, replayed on the target's own text.

    Verification keeps what the target says itself, so the outcome follows from the target's text alone.
    """
    output = Output([own.tokens[0]])
    length = min(new_tokens, len(own.tokens))  # shorter when the text ended
    while len(output.tokens) < length:
        done = len(output.tokens)
        drafted = lookup_draft([*prompt, *output.tokens], longest, block_size - 1)
        truth = own.tokens[done : done + block_size]
        right = 0
        while right < min(len(drafted), len(truth) - 1) and drafted[right] == truth[right]:
            right += 1
        output.tokens += truth[: right + 1]
        output.emitted.append(right + 1)
    return output


def twice(prompts: Tensor) -> Tensor:
    return torch.cat((prompts, prompts))


class Evaluator:
    """Measures drafters on fixed prompts; what depends on the target alone is computed once.

    Decodes in float32 unless told otherwise: in bfloat16 the target's two best tokens are often equal, and
    the order of summation then decides, so an exact comparison of texts means nothing.
    """

    def __init__(
        self, target: Target, prompts: Tensor, section: Evaluate, block_size: int, beat: Beat = lambda: None
    ) -> None:
        self.target, self.prompts, self.section = target, prompts, section
        self.block_size, self.beat = block_size, beat
        # A block may go past `new_tokens` by all but one of its tokens.
        self.longest = section.new_tokens + block_size
        self.noise = FixedNoise(
            section.temperature,
            target.vocabulary,
            prompts.shape[1] + self.longest + block_size + 1,
            NOISE_SEED,
            target.device,
        )
        self.ends = end_ids(target.config)
        self.choose = Halves(greedy, self.noise)
        self.last_s = 0.0  # what the last measurement took
        with target.widened(section.dtype == "float32"):
            own = plain(target, twice(prompts), self.longest, self.choose, self.ends, beat)
        self.own_greedy, self.own_sampled = own[: len(prompts)], own[len(prompts) :]

    def measure(
        self, drafter: Drafter, prompts: int | None = None, limit_s: float | None = None
    ) -> Measurement:
        """Real speculative decoding of the first `prompts` prompts, greedy and sampled.

        After `limit_s` seconds the texts stay as long as they are; what they show is still true.
        """
        started, section = time.monotonic(), self.section
        given = self.prompts[:prompts]
        with self.target.widened(section.dtype == "float32"):
            outputs = speculative(
                self.target,
                drafter,
                twice(given),
                section.new_tokens,
                self.choose,
                self.ends,
                self.beat,
                limit_s,
            )
        self.last_s = time.monotonic() - started
        count = len(given)
        return Measurement(
            figure(outputs[:count], self.own_greedy[:count], section.first_tokens),
            figure(outputs[count:], self.own_sampled[:count], section.first_tokens),
        )

    def measure_greedy(self, drafter: Drafter, prompts: int, new_tokens: int) -> float:
        """A quick look during training."""
        outputs = speculative(
            self.target, drafter, self.prompts[:prompts], new_tokens, greedy, self.ends, self.beat
        )
        return acceptance([output.emitted for output in outputs])

    def lookup(self) -> Measurement:
        """Prompt-lookup decoding of the same prompts, with as many drafted tokens a pass."""
        return Measurement(self._lookup(self.own_greedy), self._lookup(self.own_sampled))

    def _lookup(self, own: list[Output]) -> Figure:
        section = self.section
        outputs = [
            lookup(prompt, each, section.new_tokens, section.lookup_ngram, self.block_size)
            for prompt, each in zip(self.prompts.tolist(), own, strict=True)
        ]
        return figure(outputs, own, section.first_tokens)

    @property
    def repetition(self) -> float:
        """Share of repeated 8-grams in the target's greedy text."""
        return repeated_ngrams(self.own_greedy)
