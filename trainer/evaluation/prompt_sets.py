"""Prompts to measure on, as token ids: held-out text of the standard library, or questions of the usual
evaluation sets, asked in the target's own chat template.

A question of several turns needs the answers to the earlier ones: they are the target's own greedy answers,
which a measurement writes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.data import chat_template, evalsets
from trainer.data.chat_template import ChatTemplate, Mode
from trainer.data.encoding import Encoder
from trainer.data.evalsets import Question
from trainer.data.lines import BadRow
from trainer.errors import ConfigError


class Conversation(Protocol):
    def prompt(self, answers: Sequence[list[int]]) -> list[int] | None:
        """The prompt that follows these answers of the target; None when there is none more."""


@dataclass(frozen=True)
class Given:
    """A single prompt of known ids."""

    ids: list[int]

    def prompt(self, answers: Sequence[list[int]]) -> list[int] | None:
        return None if answers else self.ids


@dataclass(frozen=True)
class Asked:
    """A question in the target's chat template."""

    question: Question
    template: ChatTemplate
    encoder: Encoder

    def prompt(self, answers: Sequence[list[int]]) -> list[int] | None:
        turns, messages = self.question.turns, []
        if len(answers) == len(turns):
            return None
        for turn, answer in zip(turns, answers, strict=False):
            text = self.encoder.tokenizer.decode(answer, skip_special_tokens=True)
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": text}]
        messages.append({"role": "user", "content": turns[len(answers)]})
        try:
            text = self.template.render(messages, None, True)
        except BadRow as error:
            where = f"{self.question.set} {self.question.id}"
            raise ConfigError(str(error), where=where, next="name another with --chat-template") from None
        return self.encoder.tokenizer.encode(text, add_special_tokens=False).ids


@dataclass(frozen=True)
class PromptSet:
    """Conversations of one data set."""

    name: str
    conversations: Sequence[Conversation]


def given(name: str, prompts: Sequence[list[int]]) -> PromptSet:
    return PromptSet(name, [Given(ids) for ids in prompts])


def held_out(encoder: Encoder, count: int, tokens: int, seed: int) -> list[PromptSet]:
    """Text of the standard library that no training of this program sees. Raises DataError: there is none."""
    from trainer.data.prompts import draw_prompts  # torch comes in here

    return [given("stdlib", draw_prompts(encoder.tokenizer, count, tokens, True, seed).tolist())]


def questions(
    files: Sequence[Path], target: Path, encoder: Encoder, mode: Mode, template_file: Path | None, limit: int
) -> list[PromptSet]:
    """The first `limit` questions of each file, asked in the template of the target in its folder.

    Raises:
        ConfigError: a file that is no known evaluation set, or no usable chat template.
    """
    template = chat_template.load(target, mode, template_file)
    found = []
    for file in files:
        asked = [Asked(question, template, encoder) for question in evalsets.read(file, limit)]
        found.append(PromptSet(asked[0].question.set, asked))
    return found
