"""Which characters of a rendered conversation the target would have written itself: the assistant's spans.

A span begins where the generation prompt ends and goes up to and including the token that ends the turn.
Where a template has `{% generation %}` blocks, they say it. Else the conversation is rendered a second time
with marks around what each message says. Without its marks that text must be the first one to the character,
so the marks are where the messages are, whatever text they hold; the template's own words between two
messages must begin with the generation prompt. Nothing is searched for that a message could contain.
Where a template bends what it is given (cuts reasoning, looks at how a text begins), prefixes of the
conversation are rendered instead and must be prefixes of the whole. What cannot be proven is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.chat_template import CLOSE, OPEN, ChatTemplate, Messages, Mode, Span
from trainer.data.lines import BadRow
from trainer.data.marks import MOST_MESSAGES, blocks, mark, without_marks
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. Spans are in order and apart from each other."""

    text: str
    spans: tuple[Span, ...]
    other_mode: bool = False  # the last turn begins as with thinking said otherwise


class SpanFinder:
    """Renders conversations of one template and finds the assistant's spans.

    Args:
        ends: the texts of the tokens that end a turn.
        special: texts that the tokenizer turns into special tokens: no answer may hold one, since the target
            would have stopped there, or have written something else.
    """

    def __init__(self, template: ChatTemplate, ends: Sequence[str], special: Sequence[str]) -> None:
        self.template = template
        self._ends = _pattern(ends)
        self._special = _pattern(special)
        self._openings: dict[tuple[str, bool], list[str]] = {}

    def check(self) -> None:
        """Render a small conversation and find both answers in it.

        Raises:
            ConfigError: the template shows no assistant spans: nothing made by it could be trained on.
        """
        said = ("first answer", "second answer")
        messages = [
            {"role": "user", "content": "first question"},
            {"role": "assistant", "content": said[0]},
            {"role": "user", "content": "second question"},
            {"role": "assistant", "content": said[1]},
        ]
        try:
            rendered = self.find(messages, None)
            problem = f"it gives {len(rendered.spans)} spans for two answers"
            if [text in rendered.text[a:b] for text, (a, b) in zip(said, rendered.spans, strict=False)] == [
                True
            ] * 2:
                return
        except BadRow as error:
            problem = str(error)
        raise ConfigError(
            f"the chat template shows no assistant spans: {problem}",
            where=self.template.where,
            next="name a template with --chat-template FILE that writes the assistant's messages, best with "
            "{% generation %} ... {% endgeneration %} around them",
        )

    def find(self, messages: Messages, tools: list[Any] | None, last_only: bool = False) -> Rendered:
        """The text of a conversation with its assistant spans, the last one alone if asked.

        Raises:
            BadRow: the template refuses it or leaves out an answer, or a span cannot be proven.
        """
        self._refuse_special(messages)
        if self.template.marked(tools):
            rendered = Rendered(*blocks(self.template.raw(messages, tools, False)))
            first = self._blocks_before(messages, tools) if last_only else 0
        else:
            rendered = self._by_marks(messages, tools) or self._by_prefixes(messages, tools)
            first = len(rendered.spans) - 1 if last_only else 0
        rendered = Rendered(rendered.text, rendered.spans[first:], rendered.other_mode)
        if not rendered.spans:
            raise BadRow("the chat template writes nothing by the assistant here")
        self._refuse_silence(rendered)
        return rendered

    def _blocks_before(self, messages: Messages, tools: list[Any] | None) -> int:
        """How many blocks of the template are of earlier answers than the last message: an answer may have
        several, a thought's and its words', or none.
        """
        earlier = messages[:-1]
        if all(message["role"] != "assistant" for message in earlier):
            return 0
        return len(blocks(self.template.raw(earlier, tools, False))[1])

    def _refuse_silence(self, rendered: Rendered) -> None:
        """No message here says nothing, so where the text does, the template left out what was said: calls of
        tools that it does not know, or a thought without an answer. The target never ended its turn there.
        """
        for start, stop in rendered.spans:
            said = rendered.text[start:stop]
            if not (self._ends.sub("", said) if self._ends else said).strip():
                raise BadRow("the chat template leaves out all that an answer says (tool calls, a thought)")

    def _refuse_special(self, messages: Messages) -> None:
        for number, message in enumerate(messages):
            answer = message["role"] == "assistant"
            for text in _texts(message):
                if answer and self._special and (found := self._special.search(text)):
                    raise BadRow(f"message {number}: the answer holds the special token {found[0]}")
                if OPEN in text or CLOSE in text:
                    raise BadRow(f"message {number} holds a character that Unicode keeps out of text")

    def _by_marks(self, messages: Messages, tools: list[Any] | None) -> Rendered | None:
        """None when the marks change what the template writes, or do not settle the matter."""
        if len(messages) > MOST_MESSAGES:
            return None
        text = self.template.render(messages, tools, False)
        marked = self.template.render([mark(each, n) for n, each in enumerate(messages)], tools, False)
        unmarked, inside = without_marks(marked)
        if unmarked != text:
            return None
        spans: list[Span] = []
        other = False
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = inside.get(number - 1)
            here = inside.get(number)
            if before is None or here is None:
                return None
            following = inside.get(number + 1)
            if following is None and number + 1 < len(messages):
                return None
            begun = self._begin(text, messages[number - 1], message, bool(tools), before[1], here)
            if begun is None:
                return None
            start, other = begun
            stop = self._end(text, here[1], following[0] if following else len(text))
            if any(start < place < stop for each in inside if each != number for place in inside[each]):
                return None  # it is written a second time, behind what others say
            spans.append((start, stop))
        return Rendered(text, tuple(spans), other)

    def _by_prefixes(self, messages: Messages, tools: list[Any] | None) -> Rendered:
        text = self.template.render(messages, tools, False)
        spans: list[Span] = []
        other = False
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            done = self.template.render(messages[: number + 1], tools, False)
            modes = [self.template.mode, *self.template.mode.other_thinking()]
            prompts = [self._prompt(messages[:number], tools, mode) for mode in modes]
            fitting = [each for each in prompts if each is not None and done.startswith(each)]
            if not fitting or not text.startswith(done):
                raise BadRow(
                    f"message {number}: the chat template writes it otherwise in its place than at the end, "
                    "so what is the answer cannot be told; --turns each makes each answer a document"
                )
            start = len(fitting[0])
            spans.append((start, self._last_end(done, start)))
            other = fitting[0] != prompts[0] or any(len(each) > start for each in fitting[1:])
        return Rendered(text, tuple(spans), other)

    def _prompt(self, messages: Messages, tools: list[Any] | None, mode: Mode) -> str | None:
        try:
            return self.template.render(messages, tools, True, mode)
        except BadRow:
            return None

    def _begin(
        self, text: str, before: dict[str, Any], answer: dict[str, Any], tools: bool, said: int, here: Span
    ) -> tuple[int, bool] | None:
        """Where an answer begins, and whether as with thinking said otherwise; None when that is not clear.

        Args:
            before: the message before the answer, whose words end at `said`.
            here: the first and the last known place of the answer's own words.
        """
        openings = self._openings_after(before["role"], tools)
        # Marks are inside a message's outer white space, which the template may have kept.
        space = before["content"][len(before["content"].rstrip()) :]
        ends = [said + len(space), said] if text.startswith(space, said) else [said]
        found = []
        for end in ends:
            # The first is the one of this mode; the others are those of the other modes, the longest first.
            fitting = [each for each in openings if text.startswith(each, end)]
            if fitting:
                longer = any(len(each) > len(fitting[0]) for each in fitting[1:])
                found.append((end + len(fitting[0]), fitting[0] != openings[0] or longer))
        if found:
            # Of an opening that is white space alone, both may fit: one leaves what the answer begins with.
            mine = ("", answer["content"][: -len(answer["content"].lstrip()) or None])
            start, other = next((each for each in found if text[each[0] : here[0]] in mine), found[-1])
            return (start, other) if start <= here[1] else None
        # The prompt opens a thought that the template leaves out of finished answers (DeepSeek's kind): what
        # it does write before the answer's first word is the beginning of the prompt.
        for end in ends:
            if end < here[0] and any(each.startswith(text[end : here[0]]) for each in openings):
                return here[0], True
        return None

    def _last_end(self, text: str, start: int) -> int:
        """After the token that ends the turn which ends the text; others that only follow it do not count."""
        found = list(self._ends.finditer(text, start)) if self._ends else []
        while len(found) > 1 and not text[found[-2].end() : found[-1].start()].strip():
            found.pop()
        return found[-1].end() if found else len(text)

    def _end(self, text: str, start: int, stop: int) -> int:
        """After the token that ends the turn, if there is one between the message and the next."""
        found = self._ends.search(text, start, stop) if self._ends else None
        return found.end() if found else start

    def _openings_after(self, role: str, tools: bool) -> list[str]:
        """What the template writes between a message of this role and the assistant's words: the end of that
        message and the generation prompt; in this mode first, then in the others.
        """
        key = (role, tools)
        if key not in self._openings:
            found = []
            for mode in [self.template.mode, *self.template.mode.other_thinking()]:
                opening = self._opening(role, tools, mode)
                if opening is not None and opening not in found:
                    found.append(opening)
            self._openings[key] = [*found[:1], *sorted(found[1:], key=len, reverse=True)]
        return self._openings[key]

    def _opening(self, role: str, tools: bool, mode: Mode) -> str | None:
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        question: Messages = [{"role": "user", "content": "x"}]
        before: Messages = []
        if role in ("tool", "assistant"):
            before = question
        if role == "tool":
            before = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}]
        last = mark({"role": role, "content": "x"}, 0)
        tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
        try:
            marked = self.template.render([*before, last], [tool] if tools else None, True, mode)
        except BadRow:
            return None
        text, inside = without_marks(marked)
        return text[inside[0][1] :] if inside else None


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _texts(message: dict[str, Any]) -> list[str]:
    """Everything that a message says."""
    found = [message["content"], message.get("reasoning_content") or ""]
    for call in message.get("tool_calls", []):
        found += [call["function"]["name"], str(call["function"]["arguments"])]
    return found
