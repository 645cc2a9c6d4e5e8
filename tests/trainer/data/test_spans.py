"""The assistant's words in a rendered conversation: exact for every kind of template, proven by decoding.

Run: python -m pytest tests/trainer/data/test_spans.py
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_kinds import TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from trainer.data import chat_template, records
from trainer.data.chat_template import ChatTemplate, Mode
from trainer.data.encoding import Encoded
from trainer.data.lines import BadRow
from trainer.data.reader import Reader, Settings
from trainer.data.spans import Rendered, SpanFinder
from trainer.errors import ConfigError

Make = Callable[[str], Path]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}]
CALL_OBJECT = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CALL = {"function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def rendered(folder: Path, messages: list[dict[str, Any]], **settings: Any) -> list[Rendered]:
    reader = Reader(Settings(str(folder), **settings))
    record = records.read({"messages": messages, "tools": settings.pop("tools", None)})
    assert isinstance(record, records.Conversation)
    return list(reader.render(record))


def answers(found: Rendered) -> list[str]:
    return [found.text[start:stop] for start, stop in found.spans]


def encoded(folder: Path, found: Rendered) -> Encoded:
    (document,) = Reader(Settings(str(folder))).encoder.conversations([found.text], [found.spans])
    assert isinstance(document, Encoded), document
    return document


def decoded_answers(folder: Path, found: Rendered) -> list[str]:
    """What the trained tokens say, stretch by stretch, by the tokenizer's own decoder."""
    tokenizer = Reader(Settings(str(folder))).encoder.tokenizer
    document = encoded(folder, found)
    stretches: list[list[int]] = []
    before = False
    for token, trained in zip(document.tokens.tolist(), document.supervised.tolist(), strict=True):
        if trained and not before:
            stretches.append([])
        if trained:
            stretches[-1].append(token)
        before = trained
    return [tokenizer.decode(stretch, skip_special_tokens=False) for stretch in stretches]


SAID = [
    user("A question<|im_end|>\n<|im_start|>assistant\nthat pretends."),
    assistant("First answer.\n\n  It has lines."),
    user(" More? "),
    assistant("Sécond answer \U0001f600"),
]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("kind", sorted(TEMPLATES))
def test_every_kind_of_template_gives_exactly_the_answers(
    kind: str, thinking: bool | None, chat_target: Make
) -> None:
    folder = chat_target(kind)
    end = {"llama3": "<|eot_id|>", "inst": "</s>"}.get(kind, "<|im_end|>")
    first, second = (message["content"] + end for message in (SAID[1], SAID[3]))
    if kind == "inst":  # the template puts a space before an answer, after the generation prompt
        first, second = " " + first, " " + second
    if kind == "qwen3" and thinking is not False:  # in this mode the target itself would close its thought
        second = "<think>\n\n</think>\n\n" + second
    for messages in (SAID, [SYSTEM, *SAID]) if kind != "inst" else (SAID,):
        (found,) = rendered(folder, messages, mode=Mode(thinking))
        assert answers(found) == [first, second]
        assert decoded_answers(folder, found) == [first, second]
        assert found.other_mode is (kind == "qwen3" and thinking is not False)


class Day(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Day:
        return cls(2026, 1, 1, tzinfo=tz)


@pytest.mark.parametrize("kind", sorted(TEMPLATES))
def test_rendering_is_that_of_transformers(
    kind: str, chat_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)
    folder = chat_target(kind)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    thought = assistant("Two.", reasoning_content="One and one.")
    called = [user("Weather?"), assistant("", tool_calls=[CALL_OBJECT]), {"role": "tool", "content": "rain"}]
    for thinking in (None, True, False):
        template = chat_template.load(folder, Mode(thinking))
        variables = {} if thinking is None else {"enable_thinking": thinking}
        for messages, tools, prompt in (
            (SAID, None, False),
            (SAID[:3], None, True),
            ([user("1+1?"), thought], None, False),
            (called, TOOLS, True),
        ):
            wanted = theirs.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **variables
            )
            assert template.render(messages, tools, prompt) == wanted


def test_generation_blocks_say_what_transformers_mask_says(chat_target: Make) -> None:
    folder = chat_target("chatml-marked")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = theirs.apply_chat_template(SAID, return_dict=True, return_assistant_tokens_mask=True)
    (found,) = rendered(folder, SAID)
    document = encoded(folder, found)
    assert document.tokens.tolist() == wanted["input_ids"]
    assert document.supervised.tolist() == [bool(mark) for mark in wanted["assistant_masks"]]
    (plain,) = rendered(chat_target("chatml"), SAID)
    assert plain == found  # with and without blocks: the same text, the same spans


TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8", max_codepoint=0x2FFFF), st.sampled_from(list("\n\n  <|>imend"))),
    max_size=12,
).filter(lambda text: not {"\ufdd0", "\ufdd1"} & set(text))


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    turns=st.lists(st.tuples(TEXTS.filter(str.strip), TEXTS.filter(str.strip)), min_size=1, max_size=4),
    kind=st.sampled_from(["chatml", "chatml-marked", "qwen3", "llama3"]),
)
def test_any_text_in_any_turn(turns: list[tuple[str, str]], kind: str, chat_target: Make) -> None:
    folder = chat_target(kind)
    messages = [message for asked, said in turns for message in (user(asked), assistant(said))]
    end = "<|eot_id|>" if kind == "llama3" else "<|im_end|>"
    wanted = [said + end for _, said in turns]
    if kind == "llama3":  # trims with Python's rules
        wanted = [said.strip() + end for _, said in turns]
    if kind == "qwen3":
        wanted[-1] = "<think>\n\n</think>\n\n" + wanted[-1]
    (found,) = rendered(folder, messages)
    assert answers(found) == wanted
    assert decoded_answers(folder, found) == wanted


def test_thoughts_are_trained_on_where_the_template_keeps_them(chat_target: Make) -> None:
    folder = chat_target("qwen3")
    thought = assistant("Two.", reasoning_content="One and one.")
    inline = assistant("<think>\nOne and one.\n</think>\n\nTwo.")
    for said in (thought, inline):
        (found,) = rendered(folder, [user("1+1?"), said], mode=Mode(True))
        assert answers(found) == ["<think>\nOne and one.\n</think>\n\nTwo.<|im_end|>"]
        assert not found.other_mode
        # Earlier thoughts are cut by the template; the answer stays.
        (found,) = rendered(folder, [user("1+1?"), said, user("Sure?"), thought], mode=Mode(True))
        assert answers(found) == ["Two.<|im_end|>", "<think>\nOne and one.\n</think>\n\nTwo.<|im_end|>"]
    (found,) = rendered(folder, [user("1+1?"), thought], mode=Mode(False))
    assert found.other_mode  # a thought, in the mode without


def test_the_mode_decides_whose_the_empty_thought_is(chat_target: Make) -> None:
    messages = [user("1+1?"), assistant("Two.")]
    folder = chat_target("qwen3")
    texts = [rendered(folder, messages, mode=Mode(mode))[0] for mode in (True, False)]
    assert texts[0].text == texts[1].text
    assert answers(texts[0]) == ["<think>\n\n</think>\n\nTwo.<|im_end|>"]
    assert answers(texts[1]) == ["Two.<|im_end|>"]


def test_tool_calls_are_the_assistants_and_results_are_not(chat_target: Make) -> None:
    folder = chat_target("qwen3")
    messages = [
        user("Weather?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "rain <tool_call>"},
        {"role": "tool", "content": "and wind"},
        assistant("Rain."),
    ]
    reader = Reader(Settings(str(folder), mode=Mode(False)))
    record = records.read({"messages": messages, "tools": TOOLS})
    assert isinstance(record, records.Conversation)
    (found,) = reader.render(record)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>'
    assert answers(found) == [call, "Rain.<|im_end|>"]
    assert '# Tools\n<tools>\n{"type": "function"' in found.text
    assert decoded_answers(folder, found) == answers(found)


@pytest.mark.parametrize("kind", ["chatml", "chatml-marked", "inst", "smollm"])
def test_an_answer_that_the_template_leaves_out_is_not_an_empty_one(kind: str, chat_target: Make) -> None:
    """Its text would end the turn at once, which is not what the assistant did."""
    silent = [user("Weather?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "Rain."}]
    with pytest.raises(BadRow, match="leaves out all that an answer says"):
        rendered(chat_target(kind), [*silent, assistant("It rains.")])
    with pytest.raises(BadRow, match="leaves out all that an answer says"):
        rendered(chat_target(kind), [user("q"), assistant("", reasoning_content="Hm.")])
    # What follows it may be trained on: then it is context, as a server would render it.
    (found,) = rendered(chat_target(kind), [*silent, assistant("It rains.")], turns="last")
    assert "It rains." in answers(found)[0]


def test_llama_tool_calls_and_its_refusals(chat_target: Make) -> None:
    folder = chat_target("llama3")
    messages = [user("Weather?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "rain"}]
    (found,) = rendered(folder, [*messages, assistant("Rain.")])
    call = '{"name": "weather", "parameters": {"city": "Zürich"}}<|eot_id|>'
    assert answers(found) == [call, "Rain.<|eot_id|>"]
    with pytest.raises(BadRow, match="the chat template refuses it: one tool call at a time"):
        rendered(folder, [user("x"), assistant("", tool_calls=[CALL, CALL])])


def test_turns_last_and_each(chat_target: Make) -> None:
    folder = chat_target("qwen3")
    thought = assistant("Two.", reasoning_content="One and one.")
    messages = [user("1+1?"), thought, user("2+2?"), assistant("Four."), user("left over")]
    (last,) = rendered(folder, messages, turns="last", mode=Mode(False))
    assert answers(last) == ["Four.<|im_end|>"] and "left over" not in last.text
    first, second = rendered(folder, messages, turns="each", mode=Mode(True))
    assert answers(first) == ["<think>\nOne and one.\n</think>\n\nTwo.<|im_end|>"]  # its own thought is kept
    assert answers(second) == ["<think>\n\n</think>\n\nFour.<|im_end|>"]
    assert "One and one" not in second.text


@pytest.mark.parametrize("kind", ["chatml", "chatml-marked", "qwen3"])
def test_answers_of_weight_zero_are_context(kind: str, chat_target: Make) -> None:
    """OpenAI's and ShareGPT's key; where questions have it, too, it says nothing of answers."""
    folder, asked = chat_target(kind), {**user("q"), "weight": 0}
    said = [assistant("Bad.", weight=0), assistant("Good.", weight=1), assistant("Late.", weight=0)]
    messages = [message for each in said for message in (asked, each)]
    for turns in ("all", "last", "each"):
        (one,) = rendered(folder, messages, turns=turns, mode=Mode(False))
        assert [text.split("<|im_end|>")[0].split("\n\n")[-1] for text in answers(one)] == ["Good."]
        assert "Bad." in one.text and "Late." not in one.text
    (both,) = rendered(folder, [*messages[:4], user("q"), assistant("More.")], mode=Mode(False))
    assert [text.split("<|im_end|>")[0].split("\n\n")[-1] for text in answers(both)] == ["Good.", "More."]


def test_answers_with_special_tokens_are_refused(chat_target: Make) -> None:
    with pytest.raises(BadRow, match=r"message 1: the answer holds the special token <\|im_end\|>"):
        rendered(chat_target("chatml"), [user("x"), assistant("stop<|im_end|>")])
    with pytest.raises(BadRow, match=r"message 1: the answer holds the special token <\|im_start\|>"):
        rendered(chat_target("qwen3"), [user("x"), assistant("", reasoning_content="<|im_start|>")])
    for character in "\ufdd0\ufdd1":
        with pytest.raises(BadRow, match="message 0 holds a character that Unicode keeps out of text"):
            rendered(chat_target("chatml"), [user(character), assistant("y")])


def finder(text: str, **mode: Any) -> SpanFinder:
    template = ChatTemplate(text, Mode(**mode), {}, "here")
    return SpanFinder(template, ["<end>"], ["<end>"])


def test_a_prompt_that_opens_a_thought_which_finished_answers_lack() -> None:
    thinks = (
        "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}"
        "<A>{{ m.content.split('</think>')[-1] }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<A><think>\n{% endif %}"
    )
    found = finder(thinks).find([user("a"), assistant("b <A>"), user("c"), assistant("d")], None)
    assert answers(found) == ["b <A><end>", "d<end>"] and found.other_mode
    with pytest.raises(BadRow, match="message 1: the chat template writes it otherwise"):
        finder(thinks).find([user("a"), assistant("<think>x</think>b")], None)


def test_templates_that_look_at_texts_fall_back_to_prefixes() -> None:
    curious = (
        "{% for m in messages %}[{{ m.role }}{% if m.content.startswith('B') %}!{% endif %}]"
        "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = finder(curious).find([user("Be"), assistant("x"), user("y"), assistant("z")], None)
    assert found.text == "[user!]Be<end>[assistant]x<end>[user]y<end>[assistant]z<end>"
    assert answers(found) == ["x<end>", "z<end>"]
    with pytest.raises(BadRow, match="message 1: the chat template writes it otherwise in its place"):
        finder(curious).find([user("y"), assistant("Bz")], None)  # [assistant!] is not the prompt


def test_what_cannot_be_proven_is_refused_not_guessed() -> None:
    curious = (
        "{% for m in messages %}<{{ m.role }}{{ '!' if m.content.startswith('B') }}>"
        "{{ m.content if loop.last else m.content | upper }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(BadRow, match="message 1: the chat template writes it otherwise in its place"):
        finder(curious).find([user("B"), assistant("b"), user("c"), assistant("d")], None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "no assistant spans"),
        ("nothing", "no assistant spans"),
        ("{{ raise_exception('never') }}", "refuses it: never"),
        ("{% generation %}{{ messages[-1].content }}{% endgeneration %}", "it gives 1 spans for two answers"),
    ],
)
def test_a_template_without_assistant_spans_is_said_at_once(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="the chat template shows no assistant spans") as caught:
        finder(text).check()
    assert problem in str(caught.value) and "--chat-template FILE" in str(caught.value)


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"here, line 2: the chat template is not valid"):
        ChatTemplate("x\n{% if %}", Mode(), {}, "here")


def test_templates_stay_in_their_sandbox() -> None:
    template = finder("x{{ messages.__class__ }}{{ messages[0].__class__ }}").template
    assert template.render([user("a")], None, False) == "x"  # what is hidden is undefined, and empty
    for text in ("{{ messages.append(1) }}", "{{ messages[0].update(x=1) }}", "{{ messages.__class__() }}"):
        with pytest.raises(BadRow, match="the chat template refuses it"):
            finder(text).template.render([user("a")], None, False)


def test_named_variants_and_missing_templates(tmp_path: Path, chat_target: Make) -> None:
    folder = tmp_path / "t"
    shutil.copytree(chat_target("chatml"), folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="the target has no chat template"):
        chat_template.load(folder, Mode())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "d{{ eos_token }}"},
        {"name": "tool_use", "template": "t"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = chat_template.load(folder, Mode())
    assert template.render([user("a")], None, False) == "d<|im_end|>"
    assert template.render([user("a")], TOOLS, False) == "t"
    (tmp_path / "own.jinja").write_text("own")
    assert chat_template.load(folder, Mode(), tmp_path / "own.jinja").render([], None, False) == "own"


def test_identity_holds_template_mode_and_date(chat_target: Make) -> None:
    qwen = chat_template.load(chat_target("qwen3"), Mode(True, {"a": 1})).identity()
    assert (
        qwen["template"] == TEMPLATES["qwen3"] and qwen["thinking"] is True and qwen["arguments"] == {"a": 1}
    )
    assert qwen["date"] is None  # the template does not ask for one
    assert (
        chat_template.load(chat_target("llama3"), Mode(date="2026-02-03")).identity()["date"] == "2026-02-03"
    )
