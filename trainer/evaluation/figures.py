"""The figures of decoding, pooled over prompts.

Acceptance length = tokens emitted / target verification forward passes, the prompts' own pass excluded;
with it its histogram, and for each slot how often it was reached and accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.evaluation.decode import Output


@dataclass(frozen=True)
class Slot:
    """One slot of the block, over all passes: 0 is the anchor, so slots count from 1."""

    slot: int
    reached: int  # passes in which all slots before it were accepted
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.reached if self.reached else 0.0


@dataclass(frozen=True)
class Run:
    """What one way of decoding wrote, and how long it took without the prompts' own passes."""

    outputs: list[Output] = field(default_factory=list)
    seconds: float = 0.0

    def __add__(self, other: Run) -> Run:
        return Run(self.outputs + other.outputs, self.seconds + other.seconds)

    @property
    def tokens(self) -> int:
        """Written after the prompts' own passes, which give one token each."""
        return sum(len(output.tokens) - 1 for output in self.outputs)

    @property
    def passes(self) -> int:
        """Of verification; 0 for the target alone, which verifies nothing."""
        return sum(len(output.emitted) for output in self.outputs)

    @property
    def acceptance_length(self) -> float:
        return acceptance([output.emitted for output in self.outputs])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """Tokens emitted by a pass -> passes."""
        return dict(sorted(Counter(count for output in self.outputs for count in output.emitted).items()))

    def slots(self, block_size: int) -> list[Slot]:
        """Slots 1 to B-1. One behind the text's end was not reached."""
        pairs = [
            pair for output in self.outputs for pair in zip(output.emitted, output.accepted, strict=True)
        ]
        return [
            Slot(
                slot,
                sum(kept >= slot or (kept == slot - 1 and gained > kept) for gained, kept in pairs),
                sum(kept >= slot for _, kept in pairs),
            )
            for slot in range(1, block_size)
        ]


def acceptance(emitted: Sequence[Sequence[int]], first_tokens: int | None = None) -> float:
    """Pooled tokens per pass; with `first_tokens`, over each prompt's passes that begin before so many
    tokens.
    """
    tokens = passes = 0
    for counts in emitted:
        done = 0
        for count in counts:
            if first_tokens is not None and done >= first_tokens:
                break
            done += count
            tokens += count
            passes += 1
    return tokens / passes if passes else 0.0


def repeated_ngrams(outputs: Sequence[Output], size: int = 8) -> float:
    """Share of the texts' n-grams that occurred earlier in the same text."""
    repeats = total = 0
    for output in outputs:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(output.tokens) - size + 1):
            ngram = tuple(output.tokens[start : start + size])
            repeats += ngram in seen
            seen.add(ngram)
            total += 1
    return repeats / total if total else 0.0
