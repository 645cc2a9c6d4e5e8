"""The agent's answer is found among whatever else a connection brings.

Run: python -m pytest tests/unit/test_agent_frames.py
"""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from agent_kit import NONCE, frames
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent.main import Emit
from dflashctl.remote.agent_call import AnswerReader

NOISE = st.binary(max_size=60).filter(lambda noise: NONCE.encode() not in noise)


@given(
    before=NOISE,
    between=NOISE,
    after=NOISE,
    result=st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3),
    cuts=st.lists(st.integers(0, 500), max_size=8),
)
def test_frames_are_found_in_any_noise_and_however_they_are_cut(
    before: bytes, between: bytes, after: bytes, result: dict[str, str], cuts: list[int]
) -> None:
    event = frames({}, [{"n": 1}]).split(b"\nDFLASH-ANSWER")[0]
    answer = frames({"ok": True, "result": result})
    data = before + event + b"\n" + between + answer + after
    seen: list[dict[str, Any]] = []
    reader = AnswerReader(NONCE, seen.append)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in itertools.pairwise(edges):
        reader.feed(data[start:end])
    assert reader.body() == {"ok": True, "result": result}
    assert seen == [{"n": 1}]


@given(
    pieces=st.lists(
        st.binary(max_size=90) | st.just(f"\nDFLASH-ANSWER {NONCE} 2\n{{}}\nDFLASH-END {NONCE}\n".encode()),
        max_size=4,
    ),
    noise=NOISE,
    cuts=st.lists(st.integers(0, 900), max_size=8),
)
def test_bytes_come_as_they_are_between_events_and_however_they_are_cut(
    pieces: list[bytes], noise: bytes, cuts: list[int]
) -> None:
    out = io.BytesIO()
    emit = Emit(out, NONCE)
    for number, piece in enumerate(pieces):
        emit({"n": number})
        emit.data(piece)
    data = noise + b"\n" + out.getvalue() + frames({"ok": True, "result": {}})
    events: list[dict[str, Any]] = []
    got: list[bytes] = []
    for listener in (got.append, None):  # who does not ask for them passes them over
        events.clear()
        reader = AnswerReader(NONCE, events.append, listener)
        edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for start, end in itertools.pairwise(edges):
            reader.feed(data[start:end])
        assert reader.body() == {"ok": True, "result": {}}
        assert events == [{"n": number} for number in range(len(pieces))]
    assert b"".join(got) == b"".join(pieces)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"DFLASH-ANSWER " + NONCE.encode() + b" 40\n{}",
        b"DFLASH-ANSWER " + NONCE.encode() + b" 2\n{}",  # the end is missing: perhaps more was meant
        frames({"ok": True, "result": {}}, nonce="another"),
        frames({"ok": True, "result": {}})[:-20],
        b"DFLASH-ANSWER " + NONCE.encode() + b" 2\nno\nDFLASH-END " + NONCE.encode() + b"\n",
        b"DFLASH-ANSWER " + NONCE.encode() + b" 2\n[]\nDFLASH-END " + NONCE.encode() + b"\n",
    ],
)
def test_what_is_no_whole_answer_is_none(data: bytes) -> None:
    reader = AnswerReader(NONCE)
    reader.feed(data)
    assert reader.body() is None


def test_an_event_that_is_no_json_is_passed_over() -> None:
    seen: list[dict[str, Any]] = []
    reader = AnswerReader(NONCE, seen.append)
    reader.feed(f"DFLASH-EVENT {NONCE} {{broken\nDFLASH-EVENT {NONCE} [1]\n".encode())
    reader.feed(frames({"ok": True, "result": {}}, [{"n": 1}]))
    assert seen == [{"n": 1}]
    assert reader.body() == {"ok": True, "result": {}}
