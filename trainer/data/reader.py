"""Rows of the input -> documents of tokens: what a worker process of `prepare` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.data import chat_template, lines, records
from trainer.data.chat_template import Mode
from trainer.data.encoding import Encoded, Encoder
from trainer.data.lines import BadRow
from trainer.data.records import Conversation, Ids, Text
from trainer.data.spans import Rendered, SpanFinder
from trainer.errors import ConfigError

BATCH_CHARACTERS = 1 << 19  # encoded at once: enough to be quick, little enough to keep memory flat


RULES = (
    3  # raised when the same rows and settings give other tokens or another mask: their store is another one
)


@dataclass(frozen=True)
class Settings:
    """Everything besides the input that decides which tokens come out."""

    target: str  # the target's folder
    mode: Mode = field(default_factory=Mode)
    template_file: str | None = None
    turns: Literal["all", "last", "each"] = "all"  # answers trained on; each: one document for every answer
    max_line_bytes: int = 16_000_000


@dataclass
class Documents:
    """What came out of some lines. Line numbers count from 1 at the first of these lines."""

    tokens: NDArray[np.int32]  # [T] all documents one after the other
    supervised: NDArray[np.bool_]  # [T]
    lengths: NDArray[np.int64]  # [D]
    line_numbers: NDArray[np.int64]  # [D]
    lines: int  # seen, blank ones included
    rows: int  # lines with something in them
    bad: list[tuple[int, str]]  # line number, why
    other_mode: int  # documents whose last turn begins as with thinking said otherwise


class Reader:
    """Reads rows as the settings say.

    Raises:
        ConfigError: no tokenizer, or (when a conversation first needs it) no usable chat template.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        folder = Path(settings.target)
        self.encoder = Encoder(folder)
        self._finder: SpanFinder | None = None

    @property
    def finder(self) -> SpanFinder:
        if self._finder is None:
            file = Path(self.settings.template_file) if self.settings.template_file else None
            template = chat_template.load(Path(self.settings.target), self.settings.mode, file)
            finder = SpanFinder(template, self.encoder.ends, self.encoder.special)
            finder.check()
            self._finder = finder
        return self._finder

    def identity(self) -> dict[str, Any]:
        """What decides the tokens, apart from the input; the template's part is None where there is none."""
        try:
            template = self.finder.template.identity()
        except ConfigError:
            template = None
        return {
            "tokenizer_sha256": lines.file_digest(Path(self.settings.target) / "tokenizer.json"),
            "ends": self.encoder.ends,
            "template": template,
            "turns": self.settings.turns,
            "max_line_bytes": self.settings.max_line_bytes,
            "rules": RULES,
        }

    def read(self, path: Path, start: int, stop: int) -> Documents:
        """The documents of the lines that begin in bytes [start, stop) of a file; a .txt file is one."""
        gathered = _Gathered(self)
        limit = self.settings.max_line_bytes
        if path.suffix == ".txt":
            small = stop <= limit
            content = path.read_bytes().removeprefix(lines.BOM) if small else None
            gathered.line(1, lines.Line(content, stop, True), plain=True)
        else:
            for number, line in enumerate(lines.lines_in(path, start, stop, limit), 1):
                gathered.line(number, line)
        return gathered.documents()

    def render(self, record: Conversation) -> Iterator[Rendered]:
        """The texts of one conversation, as `turns` says."""
        messages, turns = record.messages, self.settings.turns
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [n for n in answers if n not in record.untrained]
        if turns == "each":
            for number in trained:
                yield self.finder.find(messages[: number + 1], record.tools, last_only=True)
            return
        # What follows the last answer teaches nothing.
        last = trained[-1]
        found = self.finder.find(messages[: last + 1], record.tools, last_only=turns == "last")
        yield found if turns == "last" else _without(found, answers[: answers.index(last) + 1], record)


def _without(found: Rendered, answers: list[int], record: Conversation) -> Rendered:
    """Only the spans of answers that are trained on; `answers` are those that were rendered, in order."""
    if record.untrained.isdisjoint(answers):
        return found
    if len(found.spans) != len(answers):
        raise BadRow("which of its answers has weight 0 cannot be told: the chat template joins some")
    pairs = zip(answers, found.spans, strict=True)
    spans = tuple(span for number, span in pairs if number not in record.untrained)
    return dataclasses.replace(found, spans=spans)


class _Gathered:
    """Documents in the order of their lines, encoded many at once."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.done: list[tuple[int, Encoded]] = []
        self.bad: dict[int, str] = {}
        self.waiting: list[tuple[int, Rendered | Text | Ids]] = []
        self.characters = self.lines = self.rows = self.other_mode = 0

    def line(self, number: int, line: lines.Line, plain: bool = False) -> None:
        self.lines = number
        limit = self.reader.settings.max_line_bytes
        try:
            if plain:
                self._take(number, lines.whole_text(line, limit))
            elif (value := lines.record(line, limit)) is None:
                return
            else:
                self._take(number, records.read(value))
        except BadRow as error:
            self.bad[number] = str(error)
        self.rows += 1

    def _take(self, number: int, record: records.Record | str) -> None:
        if isinstance(record, str):
            record = Text(record)
        if isinstance(record, Ids):
            known = self.reader.encoder.vocabulary
            if max(record.tokens) >= known:
                raise BadRow(
                    f"input_ids: {max(record.tokens)} is no token of the target, which has ids below {known}"
                )
            found: list[Rendered | Text | Ids] = [record]
        elif isinstance(record, Text):
            found = [record]
        else:
            found = list(self.reader.render(record))
        for each in found:
            self.waiting.append((number, each))
            self.characters += len(each.tokens if isinstance(each, Ids) else each.text)
            self.other_mode += isinstance(each, Rendered) and each.other_mode
        if self.characters >= BATCH_CHARACTERS:
            self._encode()

    def _encode(self) -> None:
        encoder = self.reader.encoder
        said = [each for _, each in self.waiting if isinstance(each, Rendered)]
        texts = [each.text for _, each in self.waiting if isinstance(each, Text)]
        conversations = iter(
            encoder.conversations([each.text for each in said], [each.spans for each in said])
        )
        plain = iter(encoder.plain(texts))
        for number, each in self.waiting:
            if isinstance(each, Ids):
                tokens = np.array(each.tokens, dtype=np.int32)
                encoded: Encoded | BadRow = Encoded(tokens, np.array(each.supervised, dtype=np.bool_))
            else:
                encoded = next(conversations) if isinstance(each, Rendered) else next(plain)
            if isinstance(encoded, BadRow):
                self.bad.setdefault(number, str(encoded))
            else:
                self.done.append((number, encoded))
        self.waiting, self.characters = [], 0

    def documents(self) -> Documents:
        self._encode()
        found = [encoded for _, encoded in self.done]
        empty = Encoded(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_))
        return Documents(
            np.concatenate([each.tokens for each in [empty, *found]]),
            np.concatenate([each.supervised for each in [empty, *found]]),
            np.array([len(each.tokens) for each in found], dtype=np.int64),
            np.array([number for number, _ in self.done], dtype=np.int64),
            self.lines,
            self.rows,
            sorted(self.bad.items()),
            self.other_mode,
        )
