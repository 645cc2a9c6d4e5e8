"""Templates that make marks hard to read: some of whose answers have a block, that cut, or that say it twice.

Run: python -m pytest tests/trainer/data/test_marks.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_kinds import CHATML, CHATML_MARKED, CHATML_SPECIAL, save_chat_target

from trainer.data.chat_template import ChatTemplate, Mode
from trainer.data.lines import BadRow
from trainer.data.marks import without_marks
from trainer.data.reader import Reader, Settings
from trainer.data.spans import SpanFinder

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "Two."},
]
# Calls of tools are written outside of the blocks.
CALLS_UNMARKED = CHATML_MARKED.replace(
    "{%- if message.role == 'assistant' -%}",
    "{%- if message.tool_calls -%}{{- '<|im_start|>assistant\\n' + message.tool_calls[0].function.name }}"
    "{{- '<|im_end|>\\n' }}{%- elif message.role == 'assistant' -%}",
)
# A thought and the words after it have a block each.
THOUGHTS_APART = CHATML_MARKED.replace(
    "{% generation %}",
    "{% if message.thinking %}{% generation %}[{{ message.thinking }}]{% endgeneration %}{% endif %}"
    "{{ '\\n' }}{% generation %}",
)


def finder(text: str | dict[str, str]) -> SpanFinder:
    return SpanFinder(ChatTemplate(text, Mode(), {}, "here"), ["<|im_end|>"], CHATML_SPECIAL)


def answers(
    text: str | dict[str, str], messages: list[dict[str, Any]], tools: Any = None, last_only: bool = False
) -> list[str]:
    found = finder(text).find(messages, tools, last_only)
    assert not {"\ufdd0", "\ufdd1"} & {*found.text}
    return [found.text[start:stop] for start, stop in found.spans]


@pytest.mark.parametrize(
    "variants",
    [{"default": CHATML_MARKED, "tool_use": CHATML}, {"default": CHATML, "tool_use": CHATML_MARKED}],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_of_named_variants_each_is_read_in_its_own_way(variants: dict[str, str], tools: Any) -> None:
    assert answers(variants, TALK, tools) == ["One.<|im_end|>", "Two.<|im_end|>"]


def test_the_last_answer_is_the_last_message_and_no_earlier_one() -> None:
    called = [*TALK[:3], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert answers(CALLS_UNMARKED, TALK, last_only=True) == ["Two.<|im_end|>"]
    with pytest.raises(BadRow, match="nothing by the assistant here"):
        answers(CALLS_UNMARKED, called, last_only=True)


def test_all_blocks_of_the_last_answer_are_its_own() -> None:
    thoughts = [{**each, "thinking": f"{n}"} if n % 2 else each for n, each in enumerate(TALK)]
    assert answers(THOUGHTS_APART, thoughts) == ["[1]", "One.<|im_end|>", "[3]", "Two.<|im_end|>"]
    assert answers(THOUGHTS_APART, thoughts, last_only=True) == ["[3]", "Two.<|im_end|>"]


def test_each_makes_no_document_of_an_answer_twice(tmp_path: Path) -> None:
    folder = save_chat_target(tmp_path / "t", "chatml")
    (folder / "chat_template.jinja").write_text(CALLS_UNMARKED)
    called = [*TALK[:3], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"messages": called}) + "\n")
    for turns in ("each", "last"):
        found = Reader(Settings(str(folder), turns=turns)).read(source, 0, source.stat().st_size)  # type: ignore[arg-type]
        assert len(found.lengths) == 0 and len(found.bad) == 1


@pytest.mark.parametrize("letters", range(1, 12))
def test_a_template_that_cuts_texts_is_read_wherever_it_cuts(letters: int) -> None:
    """Be it within a mark: then by prefixes. Where it is before one, the answer's end is not known."""
    cut = CHATML.replace("message.content + '<|im_end|>\\n'", "message.content[:8]")
    said = {"role": "assistant", "content": "a" * letters}
    if letters == 6:
        with pytest.raises(BadRow):
            answers(cut, [TALK[0], said])
    else:
        assert answers(cut, [TALK[0], said]) == ["a" * min(8, letters)]


def test_a_text_that_ends_within_a_mark_has_no_places() -> None:
    assert without_marks("ab\ufdd0") == without_marks("ab\ufdd0<") == ("", {})
    assert without_marks("ab\ufdd0\ue001c\ufdd0\ue001d") == ("abcd", {1: (2, 3)})


def test_an_answer_that_is_written_again_behind_others_takes_none_of_their_words() -> None:
    quoting = (
        CHATML + "{% if messages | length > 2 %}{{ 'It began with: ' + messages[1].content }}{% endif %}"
    )
    with pytest.raises(BadRow, match="what is the answer cannot be told"):
        answers(quoting, TALK)


@pytest.mark.parametrize("space", ["", "\n", "\n\n", " \n"])
@pytest.mark.parametrize("lead", ["", "\n"])
@pytest.mark.parametrize("stripped", [False, True])
def test_of_white_space_between_question_and_answer_each_has_its_own(
    space: str, lead: str, stripped: bool
) -> None:
    """The template says nothing but a line end there, and what it strips is not there."""
    strip = " | trim" if stripped else ""
    bare = (
        "{% for m in messages %}{{ m.content"
        f"{strip}"
        " }}{{ '</s>' if m.role == 'assistant' else '\\n' }}{% endfor %}"
    )
    talk = [{**TALK[0], "content": f"one?{space}"}, {**TALK[1], "content": f"{lead}One."}]
    reader = SpanFinder(ChatTemplate(bare, Mode(), {}, "here"), ["</s>"], ["</s>"])
    found = reader.find(talk, None)
    assert [found.text[start:stop] for start, stop in found.spans] == [
        "One.</s>" if stripped else f"{lead}One.</s>"
    ]


@pytest.mark.parametrize("question", ["q", ""])
def test_the_end_of_the_whole_text_is_not_the_answers(question: str) -> None:
    """Phi's: a further end token behind all turns. An empty question has no marks: prefixes tell then."""
    closed = CHATML + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
    reader = SpanFinder(
        ChatTemplate(closed, Mode(), {}, "here"), ["<|im_end|>", "<|endoftext|>"], CHATML_SPECIAL
    )
    found = reader.find([{"role": "user", "content": question}, TALK[1]], None)
    assert [found.text[start:stop] for start, stop in found.spans] == ["One.<|im_end|>"]
