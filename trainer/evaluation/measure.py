"""A drafter on sets of prompts: every way of choosing tokens, by every method, timed and compared.

The methods are the target alone, the drafter, and prompt-lookup decoding, which needs no drafter. Greedy
texts must be the target's own (trainer.lossless); sampled ones are drawn with rejection sampling, so they are
distributed as the target's own. Rates count what is written after the prompts' own passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from trainer.evaluation.as_trained import right_slots, training_step
from trainer.evaluation.decode import Beat, Output, plain, speculate
from trainer.evaluation.figures import Run
from trainer.evaluation.lossless import Divergence, divergences
from trainer.evaluation.prompt_sets import PromptSet
from trainer.evaluation.proposers import BatchDrafter, PromptLookup, Proposer
from trainer.evaluation.sampling import Matching, Rejection, Way, greedy
from trainer.model.drafter import Drafter
from trainer.model.positions import positions
from trainer.model.target import Target
from trainer.model.target_files import end_ids
from trainer.sections import Evaluate

WARM_TOKENS = 4
METHODS = ("target", "drafter", "prompt_lookup")


@dataclass(frozen=True)
class Options:
    """What the Evaluate section of a recipe does not say."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch: int = 1  # prompts of one length that are decoded together
    sampled: bool = True


@dataclass(frozen=True)
class Found:
    """A divergence, and where it is."""

    set: str
    prompt: int  # its number in the order of decoding
    method: str
    divergence: Divergence


@dataclass
class SetResult:
    """All figures of one set: way -> method -> run."""

    name: str
    prompts: int
    runs: dict[str, dict[str, Run]]
    found: list[Found] = field(default_factory=list)
    right: list[int] = field(default_factory=list)  # leading right slots of each greedy block, as trained
    left_out: int = 0  # prompts that leave no room for the new tokens in what the target can read

    def __add__(self, other: SetResult) -> SetResult:
        runs = {
            way: {method: run + other.runs[way][method] for method, run in methods.items()}
            for way, methods in self.runs.items()
        }
        count = self.prompts + other.prompts
        found, right = self.found + other.found, self.right + other.right
        return SetResult(self.name, count, runs, found, right, self.left_out + other.left_out)

    @property
    def as_trained(self) -> float:
        """The acceptance length that the training pass promises for the blocks that decoding drafted."""
        return 1 + sum(self.right) / len(self.right) if self.right else 0.0

    @property
    def disagreeing(self) -> int:
        """Blocks of which the training pass gets more or fewer slots right than decoding accepted."""
        accepted = [kept for output in self.runs["greedy"]["drafter"].outputs for kept in output.accepted]
        return sum(a != b for a, b in zip(accepted, self.right, strict=True))


class Bench:
    """Decodes prompts in every way, by every method, and times it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        section: Evaluate,
        options: Options,
        seed: int = 0,
        ends: Collection[int] = (),
    ) -> None:
        """ends: tokens that end a text, beside those that the target's configuration names."""
        self.target, self.drafter, self.section, self.options = target, drafter, section, options
        self.block_size = drafter.config.block_size
        self.ends = frozenset((*end_ids(target.config), *ends))
        known = positions(target.config.to_dict())
        # A block may go past `new_tokens` by all but one of its tokens.
        self.longest = None if known is None else known - section.new_tokens - self.block_size
        self.exact = target.dtype == torch.float32
        self.step = training_step(drafter, target)
        self.ways: dict[str, Way] = {"greedy": Matching(greedy)}
        if options.sampled:
            self.ways["sampled"] = Rejection(section.temperature, seed, target.device)

    def warm_up(self, given: PromptSet) -> None:
        """Kernels are chosen and memory is taken before anything is timed."""
        first = given.conversations[0].prompt([]) or []
        longest = len(first) if self.longest is None else max(1, self.longest)
        prompt = torch.tensor([first[:longest]], device=self.target.device)
        for name in self.ways:
            for method in METHODS:
                self.decode(prompt, name, method, WARM_TOKENS)

    def measure(self, given: PromptSet) -> SetResult:
        """All ways and methods on one set, turn by turn."""
        result = SetResult(given.name, 0, {name: dict.fromkeys(METHODS, Run()) for name in self.ways})
        answers: list[list[list[int]]] = [[] for _ in given.conversations]
        asks_on = set(range(len(answers)))  # a conversation ends with the first prompt that does not fit
        while True:
            pairs = zip(given.conversations, answers, strict=True)
            asked = [
                each.prompt(said) if number in asks_on else None for number, (each, said) in enumerate(pairs)
            ]
            prompts = {number: prompt for number, prompt in enumerate(asked) if prompt is not None}
            for number in [each for each, prompt in prompts.items() if not self.fits(prompt)]:
                asks_on.discard(number)
                del prompts[number]
                result.left_out += 1
            if not prompts:
                return result
            for numbers, batch in self.batches(prompts):
                for name, methods in result.runs.items():
                    for method in METHODS:
                        methods[method] += self.decode(batch, name, method, self.section.new_tokens)
                self.compare(result, batch)
                own = result.runs["greedy"]["target"].outputs[-len(numbers) :]
                for number, output in zip(numbers, own, strict=True):
                    said = output.tokens[: self.section.new_tokens]
                    answers[number].append([token for token in said if token not in self.ends])
            result.prompts += len(prompts)

    def fits(self, prompt: list[int]) -> bool:
        return self.longest is None or len(prompt) <= self.longest

    def batches(self, prompts: dict[int, list[int]]) -> list[tuple[list[int], Tensor]]:
        """Prompts in their order, neighbours of one length together: (their numbers, ids [R, P])."""
        found = []
        for _, group in groupby(prompts, lambda number: len(prompts[number])):
            same = list(group)
            for place in range(0, len(same), self.options.batch):
                part = same[place : place + self.options.batch]
                ids = torch.tensor([prompts[number] for number in part], device=self.target.device)
                found.append((part, ids))
        return found

    def decode(self, prompts: Tensor, way: str, method: str, new_tokens: int) -> Run:
        how, ends = self.ways[way], self.ends
        if method == "target":
            # A block may go past `new_tokens` by all but one of its tokens; those are compared, too.
            longest = new_tokens + self.block_size
            return self.timed(
                lambda mark: plain(self.target, prompts, longest, how.choose, ends, prefilled=mark)
            )
        lookup = PromptLookup(self.section.lookup_ngram, self.block_size - 1)
        proposer: Proposer = lookup if method == "prompt_lookup" else BatchDrafter(self.drafter, self.target)
        return self.timed(
            lambda mark: speculate(self.target, proposer, prompts, new_tokens, how, ends, prefilled=mark)
        )

    def timed(self, work: Callable[[Beat], list[Output]]) -> Run:
        """What `work` writes, and the seconds from when it calls its mark to its end."""
        marks: list[float] = []

        def mark() -> None:
            if self.target.device.type == "cuda":
                torch.cuda.synchronize(self.target.device)
            marks.append(time.perf_counter())

        outputs = work(mark)
        mark()
        return Run(outputs, marks[-1] - marks[0])

    def compare(self, result: SetResult, prompts: Tensor) -> None:
        """The last batch's greedy texts against the target's own, and its blocks against the training
        pass.
        """
        runs, count = result.runs["greedy"], len(prompts)
        own = runs["target"].outputs
        for method in METHODS[1:]:
            for row, output in enumerate(runs[method].outputs[-count:], len(own) - count):
                prompt = prompts[row - len(own)]
                for each in divergences(self.target, prompt, own[row], output, self.exact):
                    result.found.append(Found(result.name, row, method, each))
        for prompt, output in zip(prompts, runs["drafter"].outputs[-count:], strict=True):
            result.right += right_slots(self.step, self.target, prompt, output)
