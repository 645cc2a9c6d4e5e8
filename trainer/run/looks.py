"""What is measured in the middle of training: real decoding of a few prompts, and prefix-match on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from trainer.checkpoint.identity import completed
from trainer.checkpoint.resume import Progress
from trainer.evaluation.evaluator import Evaluator
from trainer.process.runfiles import RunFiles
from trainer.run.held_out import HeldOut, Matched, leak
from trainer.run.setup import Assembled
from trainer.sections import Evaluate, TrainConfig
from trainer.training.step import DrafterStep

QUICK_TOKENS = 48  # of each text


def same_looks(there: Mapping[str, Any], here: Evaluate) -> bool:
    """Whether what is looked at is the same, so that acceptance lengths compare.

    Args:
        there: the section of a checkpoint's recipe.
    """
    return _looked_at(completed(there, asdict(Evaluate()))) == _looked_at(asdict(here))


def _looked_at(section: Mapping[str, Any]) -> tuple[int, int, int]:
    """Prompts, tokens of each, and tokens of each text."""
    prompts = min(section["every_prompts"], section["prompts"])
    return prompts, section["prompt_tokens"], min(QUICK_TOKENS, section["new_tokens"])


class Looks:
    """Looks at the drafter as it is. Without an evaluator there is nothing to look with."""

    def __init__(
        self,
        config: TrainConfig,
        files: RunFiles,
        parts: Assembled,
        evaluator: Evaluator | None,
        say: Callable[[str], None],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        """record: of figures."""
        self.files, self.parts, self.evaluator = files, parts, evaluator
        self.say, self.record = say, record
        self.prompts = config.evaluate.every_prompts
        self.tokens = min(QUICK_TOKENS, config.evaluate.new_tokens)
        self.held_out: HeldOut | None = None

    def prepare(self) -> None:
        """The held-out blocks: the target's own continuations of the prompts."""
        if self.evaluator is None:
            return
        texts = [output.tokens for output in self.evaluator.own_greedy]
        size = self.parts.drafter.config.block_size
        prompts = self.evaluator.prompts[: self.prompts]
        self.held_out = HeldOut(self.parts.target, prompts, texts[: self.prompts], self.tokens, size)

    def match(self, step: DrafterStep) -> Matched | None:
        """Prefix-match on the held-out blocks, recorded."""
        if self.held_out is None:
            return None
        self.parts.drafter.eval()
        matched = self.held_out.match(step)
        self.parts.drafter.train()
        self.record({"prefix_acceptance_length": round(matched.prefix, 4)})
        return matched

    def look(self, progress: Progress, step: DrafterStep) -> bool:
        """Real decoding beside prefix-match, recorded in `progress`; False: this step has been looked at.

        A drafter that decodes worse than the training pass promises has seen what it may not: that is said.
        """
        measured = progress.measured
        if self.evaluator is None or (measured and measured[-1][0] == progress.step):
            return False
        matched = self.match(step)
        self.parts.drafter.eval()
        length = self.evaluator.measure_greedy(self.parts.drafter, self.prompts, self.tokens)
        self.parts.drafter.train()
        measured.append((progress.step, None if matched is None else matched.prefix, length))
        self.record({"acceptance_length": round(length, 4)})
        beside = "" if matched is None else f", prefix-match {matched.prefix:.2f}"
        self.say(
            f"step {progress.step} acceptance length {length:.2f} "
            f"(first {self.tokens} tokens, few prompts){beside}"
        )
        warning = None if matched is None else leak(matched.promised, length)
        if warning:
            self.say(f"WARNING: {warning}")
            self.files.note(warning)
        return True
