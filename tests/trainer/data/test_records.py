"""Rows of the input: byte ranges, bad lines, every form of a conversation.

Run: python -m pytest tests/trainer/data/test_records.py
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import lines, records
from trainer.data.lines import BadRow, Line, lines_in
from trainer.data.records import Conversation, Ids, Text


@settings(max_examples=100, deadline=None)
@given(
    content=st.lists(st.binary(max_size=12), max_size=12).map(b"\n".join),
    step=st.integers(1, 40),
    limit=st.integers(1, 12),
)
def test_ranges_share_out_every_line_once(
    content: bytes, step: int, limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(content)
    found = [
        line
        for at in range(0, len(content), step)
        for line in lines_in(path, at, min(at + step, len(content)), limit)
    ]
    wanted = content.split(b"\n")
    ended = [True] * (len(wanted) - 1) + [False]
    if not wanted[-1]:
        wanted.pop()
    assert [line.raw for line in found] == [each if len(each) <= limit else None for each in wanted]
    assert [line.ended for line in found] == ended[: len(wanted)]
    assert sum(line.size for line in found) == len(content)


def test_a_line_of_50_mb_is_passed_over_and_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"text": "short"}\n')
    tracemalloc.start()
    found = list(lines_in(path, 0, path.stat().st_size, 1_000_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line.raw for line in found] == [None, b'{"text": "short"}'] and peak < 8e6
    with pytest.raises(BadRow, match=r"50\.0 MB long, more than the limit of 1\.0 MB"):
        lines.record(found[0], 1_000_000)


@pytest.mark.parametrize(
    ("raw", "ended", "problem"),
    [
        (b'{"text": "a', False, r"not JSON: Unterminated string .* the file may be cut off"),
        (b'{"text": "a', True, r"not JSON: Unterminated string starting at at character 10$"),
        (b'{"text": "\xff\xfe"}', True, r"not UTF-8: byte 0xff at byte 11"),
        (b"\xef\xbb\xbf{}", True, "not JSON: Unexpected UTF-8 BOM"),
        (b"[1]", True, "not a JSON object but a list"),
        (b"7", True, "not a JSON object but a number"),
        (b"null", True, "not a JSON object but null"),
        (b"true", True, "not a JSON object but true or false"),
        (b"[" * 100_000, True, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", True, "not JSON that can be read: Exceeds the limit"),
    ],
)
def test_bad_lines_say_what_is_wrong(raw: bytes, ended: bool, problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        lines.record(Line(raw, len(raw), ended), 1_000_000)


def test_blank_lines_are_nothing() -> None:
    assert lines.record(Line(b" \t\r", 4, True), 10) is None


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, end: bytes) -> None:
    """Whatever the ranges; only at the file's beginning, where editors put it."""
    path, mark = tmp_path / "a.jsonl", b"\xef\xbb\xbf"
    path.write_bytes(mark + end.join([b'{"text": "a"}', b'{"text": "\xef\xbb\xbfb"}', mark + b"{}"]))
    size = path.stat().st_size
    for cut in range(size + 1):
        found = [*lines.lines_in(path, 0, cut, 100), *lines.lines_in(path, cut, size, 100)]
        assert sum(line.size for line in found) == size
        values = [lines.record(line, 100) for line in found[:2]]
        assert values == [{"text": "a"}, {"text": "\ufeffb"}]
        with pytest.raises(BadRow, match="BOM"):
            lines.record(found[2], 100)


def messages(value: dict[str, Any]) -> list[dict[str, Any]]:
    record = records.read(value)
    assert isinstance(record, Conversation)
    return record.messages


def test_messages_and_sharegpt_come_out_alike() -> None:
    wanted = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    assert messages({"messages": wanted}) == wanted
    turns = [("system", "s"), ("human", "u"), ("gpt", "a")]
    assert messages({"conversations": [{"from": who, "value": text} for who, text in turns]}) == wanted
    assert messages({"id": "1", "conversations": wanted}) == wanted
    parts = [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, wanted[2]]
    assert messages({"messages": parts})[0]["content"] == "ab"


def test_reasoning_tools_and_calls() -> None:
    said = {"role": "assistant", "content": "a", "reasoning": "r"}
    assert messages({"messages": [said]})[0] == {
        "role": "assistant", "content": "a", "reasoning_content": "r", "thinking": "r",
    }  # fmt: skip
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    (message,) = messages({"messages": [said]})
    assert message["content"] == "" and message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "1"}
    ]
    turns = [
        {"from": "human", "value": "u"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "o"},
        {"from": "gpt", "value": "a"},
    ]
    record = records.read({"conversations": turns, "tools": '[{"name": "f"}]'})
    assert isinstance(record, Conversation) and record.tools == [{"name": "f"}]
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool", "assistant"]
    assert record.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


def test_what_stands_beside_the_messages_is_said_first() -> None:
    turns = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]
    wanted = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    assert messages({"system": "s", "conversations": turns}) == wanted
    assert messages({"system": "s", "messages": wanted}) == wanted
    for nothing in (None, "", "  "):
        assert messages({"system": nothing, "conversations": turns}) == wanted[1:]


def test_keys_that_are_null_are_left_out() -> None:
    """As tables have it: every row with the columns of all."""
    empty = dict.fromkeys(["messages", "conversations", "input_ids", "loss_mask", "text", "tools", "system"])
    said = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    assert records.read({**empty, "text": "a"}) == Text("a")
    assert records.read({**empty, "input_ids": [5, 6], "loss_mask": [0, 1]}) == Ids([5, 6], [False, True])
    assert messages({**empty, "messages": said}) == messages({**empty, "conversations": said}) == said
    columns = {"role": None, "content": None, "tool_calls": None, "reasoning_content": None, "name": None}
    both = [{**columns, "from": "human", "value": "u"}, {**columns, "from": "gpt", "value": "a"}]
    assert messages({**empty, "conversations": both}) == said


def test_text_and_ids() -> None:
    assert records.read({"text": "a"}) == Text("a")
    assert records.read({"input_ids": [5, 6], "loss_mask": [0, 1]}) == Ids([5, 6], [False, True])


ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"messages": None, "text": None}, r"no messages, conversations, text or input_ids in it"),
        ({"messages": [ANSWER], "system": 7}, "system: expected text"),
        (
            {"messages": [{"role": "system", "content": "t"}, ANSWER], "system": "s"},
            "system: another one than the first message",
        ),
        ({"messages": [{"role": "assistant", "content": "", "name": "bot"}]}, "the assistant says nothing"),
        ({}, r"no messages, conversations, text or input_ids in it \(keys: none\)"),
        ({"prompt": 1, "b": 2}, r"\(keys: b, prompt\)"),
        ({"messages": []}, "messages: the conversation is empty"),
        ({"conversations": []}, "conversations: the conversation is empty"),
        ({"messages": "x"}, "messages: expected a list"),
        ({"messages": ["x"]}, r"messages\[0\]: expected an object"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message by the assistant, so nothing"),
        ({"messages": [{"role": "boss", "content": "a"}]}, r"messages\[0\]: unknown role 'boss' \(known: "),
        ({"messages": [{"content": "a"}]}, "unknown role None"),
        ({"messages": [{"role": ["x"], "content": "a"}]}, "unknown role"),
        ({"messages": [{"role": "assistant", "content": " "}]}, r"messages\[0\]: the assistant says nothing"),
        ({"messages": [{"role": "assistant", "content": 7}]}, r"messages\[0\]\.content: expected text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images and sound cannot be used"),
        ({"messages": [{**ANSWER, "reasoning_content": 7}]}, "reasoning_content: expected text"),
        ({"messages": [{**ANSWER, "tool_calls": {"a": 1}}]}, "tool_calls: expected a list"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": {}}]}]}, "expected a function with a name"),
        ({"messages": [{**ANSWER, "weight": 0}]}, "messages: every answer has weight 0, so nothing to train"),
        *(
            ({"messages": [{**ANSWER, "weight": odd}, ANSWER]}, r"messages\[0\]\.weight: .* neither 0 nor 1")
            for odd in (0.5, -1, 2, float("nan"), "0", [0])
        ),
        ({"messages": [ANSWER], "tools": "{"}, "tools: expected JSON"),
        ({"messages": [ANSWER], "tools": {"a": 1}}, "tools: expected a list"),
        ({"messages": [{"role": "assistant", "content": "a\ud800"}]}, "half a surrogate pair at character 2"),
        ({"conversations": [{"from": "function_call", "value": "nonsense"}]}, "expected JSON"),
        ({"text": ""}, "text: expected text that is not empty"),
        ({"text": 7}, "text: expected text"),
        ({"input_ids": [], "loss_mask": []}, "input_ids: expected a list of token ids that is not empty"),
        ({"input_ids": [1]}, "loss_mask: needed beside input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask: 1 marks for 2 input_ids"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "input_ids: -2 is no token id"),
        ({"input_ids": [1, True], "loss_mask": [1, 1]}, "input_ids: True is no token id"),
        ({"input_ids": [1], "loss_mask": [2]}, "loss_mask: 2 is neither 0 nor 1"),
        ({"input_ids": [1], "loss_mask": [0]}, "loss_mask: all zero, so nothing to train on"),
    ],
)  # fmt: skip
def test_bad_rows_say_where_and_what(value: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRow, match=problem):
        records.read(value)


@settings(max_examples=120, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "conversations", "role", "from", "content", "value", "text", "tools", "weight",
                 "tool_calls", "function", "name", "arguments", "input_ids", "loss_mask"]
            ),
            inner,
            max_size=4,
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_whatever_json_holds_is_a_record_or_a_bad_row(value: Any) -> None:
    if not isinstance(value, dict):
        value = {"messages": value}
    try:
        record = records.read(json.loads(json.dumps(value)))
    except BadRow:
        return
    assert isinstance(record, (Conversation, Text, Ids))
