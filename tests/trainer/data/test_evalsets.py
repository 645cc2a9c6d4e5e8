"""Evaluation sets read from local files as they are published.

Run: python -m pytest tests/trainer/data/test_evalsets.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trainer.data import evalsets
from trainer.errors import ConfigError

HUMANEVAL = {
    "task_id": "HumanEval/7",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(f):\n    assert f(1) == 2\n",
}
GSM8K = {"question": "Ann has 2 apples and buys 3. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
MATH = {
    "problem": "What is $1+1$?",
    "solution": "It is $\\boxed{2}$.",
    "answer": "2",
    "subject": "Prealgebra",
    "level": 1,
    "unique_id": "test/prealgebra/1.json",
}
MBPP = {
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n  return 2 * x",
    "task_id": 11,
    "test_setup_code": "",
    "test_list": ["assert double(1) == 2", "assert double(2) == 4"],
    "challenge_test_list": [],
}
SANITIZED = {
    **{key: MBPP[key] for key in ("code", "task_id", "test_list")},
    "prompt": "Double it.",
    "source_file": "x",
}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "name", "key", "holds"),
    [
        (HUMANEVAL, "humaneval", "HumanEval/7", [HUMANEVAL["prompt"]]),
        (GSM8K, "gsm8k", "0", [GSM8K["question"]]),
        (MATH, "math500", "test/prealgebra/1.json", ["What is $1+1$?", "\\boxed{}"]),
        (MBPP, "mbpp", "11", [MBPP["text"], "assert double(2) == 4"]),
        (SANITIZED, "mbpp", "11", ["Double it.", "assert double(1) == 2"]),
    ],
)
def test_each_set_gives_its_questions_and_not_its_answers(
    row: dict[str, Any], name: str, key: str, holds: list[str], tmp_path: Path
) -> None:
    (question,) = evalsets.read(lines(tmp_path / "set.jsonl", row))
    assert (question.set, question.id, len(question.turns)) == (name, key, 1)
    for text in holds:
        assert text in question.turns[0]
    for answer in ("return 2 * x", "####", "It is $"):
        assert answer not in question.turns[0]


def test_mt_bench_has_two_turns(tmp_path: Path) -> None:
    (question,) = evalsets.read(lines(tmp_path / "question.jsonl", MT_BENCH))
    assert question == evalsets.Question("mt-bench", "81", ("Write a post.", "Rewrite it."))


def test_packed_files_lists_blank_lines_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(HUMANEVAL) + "\n\n" + json.dumps(HUMANEVAL)).encode()))
    assert len(evalsets.read(path)) == 2
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([SANITIZED] * 5, indent=2))
    assert len(evalsets.read(tmp_path / "sanitized-mbpp.json", limit=3)) == 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        (b"", "there are no questions in it"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"question": "a"', r"set\.jsonl:1: not JSON"),
        (b"[1]", "a row is not a JSON object"),
        (b"[{", "not JSON"),
        (b'{"a": 1}\n', r"not a known evaluation set \(keys: a\)"),
        (b'{"question_id": 1, "turns": []}\n', "row 1 is not a question of mt-bench"),
        (json.dumps(GSM8K).encode() + b'\n{"answer": "5"}\n', "row 2 is not a question of gsm8k"),
        (json.dumps({**MBPP, "test_list": None}).encode(), "row 1 is not a question of mbpp"),
    ],
)
def test_other_files_are_said(content: bytes | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        evalsets.read(path)


def test_a_packed_file_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode())[:-9])
    with pytest.raises(ConfigError, match="cannot be read"):
        evalsets.read(path)
