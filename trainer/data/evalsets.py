"""Questions of the usual evaluation sets, read from local files as they are published.

| set | file | keys that tell it |
|---|---|---|
| HumanEval | HumanEval.jsonl, .jsonl.gz | task_id, prompt, entry_point |
| GSM8K | test.jsonl | question, answer |
| MATH-500 | test.jsonl | problem, solution |
| MBPP | mbpp.jsonl, sanitized-mbpp.json | text or prompt, code, test_list |
| MT-bench | question.jsonl | question_id, turns |
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

STEP_BY_STEP = "Think step by step, and put the final answer within \\boxed{}."


@dataclass(frozen=True)
class Question:
    """What a person would ask. Turns are asked one after the other, each with the answers before it."""

    set: str
    id: str
    turns: tuple[str, ...]


def _humaneval(row: Mapping[str, Any], number: int) -> Question:
    ask = f"Complete this Python function. Answer with the whole function.\n```python\n{row['prompt']}```"
    return Question("humaneval", str(row["task_id"]), (ask,))


def _gsm8k(row: Mapping[str, Any], number: int) -> Question:
    return Question("gsm8k", str(number), (f"{row['question']}\n{STEP_BY_STEP}",))


def _math500(row: Mapping[str, Any], number: int) -> Question:
    return Question("math500", str(row.get("unique_id", number)), (f"{row['problem']}\n{STEP_BY_STEP}",))


def _mbpp(row: Mapping[str, Any], number: int) -> Question:
    tests = "\n".join(row["test_list"])
    task = row.get("text", row.get("prompt"))
    ask = f"{task}\nWrite it in Python. It must pass these tests:\n```python\n{tests}\n```"
    return Question("mbpp", str(row["task_id"]), (ask,))


def _mt_bench(row: Mapping[str, Any], number: int) -> Question:
    return Question("mt-bench", str(row["question_id"]), tuple(row["turns"]))


Make = Callable[[Mapping[str, Any], int], Question]
SETS: dict[str, tuple[set[str], Make]] = {
    "humaneval": ({"task_id", "prompt", "entry_point"}, _humaneval),
    "mbpp": ({"task_id", "code", "test_list"}, _mbpp),
    "mt-bench": ({"question_id", "turns"}, _mt_bench),
    "math500": ({"problem", "solution"}, _math500),
    "gsm8k": ({"question", "answer"}, _gsm8k),
}


def read(path: Path, limit: int | None = None) -> list[Question]:
    """The questions of a file, the first `limit` of them; which set it is, its keys tell.

    Raises:
        ConfigError: no such file, not in a published format, or a row that is not like the first.
    """
    rows = _rows(path)
    if not rows:
        raise ConfigError("there are no questions in it", where=str(path))
    name = next((name for name, (keys, _) in SETS.items() if keys <= set(rows[0])), None)
    if name is None:
        raise ConfigError(
            f"not a known evaluation set (keys: {', '.join(sorted(rows[0]))})",
            where=str(path),
            next=f"known are {', '.join(SETS)}, as published",
        )
    make = SETS[name][1]
    questions = []
    for number, row in enumerate(rows[:limit]):
        try:
            question = make(row, number)
            sound = bool(question.turns) and all(isinstance(turn, str) and turn for turn in question.turns)
        except (KeyError, TypeError):
            sound = False
        if not sound:
            raise ConfigError(f"row {number + 1} is not a question of {name}", where=str(path))
        questions.append(question)
    return questions


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path)) from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path)) from None
    rows: list[Any] = []
    if text.lstrip().startswith("["):  # one list, as sanitized-mbpp.json
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"not JSON: {error}", where=str(path)) from None
    else:
        for number, line in enumerate(text.split("\n"), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise ConfigError(f"not JSON: {error.msg}", where=f"{path}:{number}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError("a row is not a JSON object", where=str(path))
    return rows
