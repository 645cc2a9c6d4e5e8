"""Evaluation sets become prompts in the target's template; later turns follow the target's own answers.

Run: python -m pytest tests/trainer/eval/test_prompt_sets.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_bench import TAPS, bench
from typer.testing import CliRunner

from trainer.checkpoint import files as checkpoint
from trainer.cli import app
from trainer.data.chat_template import Mode
from trainer.data.encoding import Encoder
from trainer.errors import ConfigError
from trainer.evaluation.given import Questions
from trainer.evaluation.prompt_sets import given, held_out
from trainer.model.drafter import Drafter
from trainer.model.target import Target, load_target
from trainer.sections import Optimizer
from trainer.training.optim import DrafterOptimizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}hm{% endif %}{% endif %}"
)
GSM8K = [{"question": "2 + 2?", "answer": "#### 4"}, {"question": "3 + 3?", "answer": "#### 6"}]
MT_BENCH = [{"question_id": 81, "category": "writing", "turns": ["Hi.", "Again?"]}]


@pytest.fixture
def chat_target(saved_target: Path) -> Path:
    (saved_target / "chat_template.jinja").write_text(TEMPLATE)
    return saved_target


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_are_asked_in_the_template(chat_target: Path, tmp_path: Path) -> None:
    encoder = Encoder(chat_target)
    files = [lines(tmp_path / "a.jsonl", GSM8K), lines(tmp_path / "b.jsonl", MT_BENCH)]
    first, second = Questions(files).read(chat_target, encoder, 5)
    assert (first.name, second.name) == ("gsm8k", "mt-bench")
    text = encoder.tokenizer.decode(first.conversations[1].prompt([]) or [])
    assert text.startswith("<user>3 + 3?\n") and text.endswith("</><assistant>")
    assert first.conversations[1].prompt([[5]]) is None
    answer = encoder.tokenizer.encode("Ho.", add_special_tokens=False).ids
    later = second.conversations[0].prompt([answer])
    assert encoder.tokenizer.decode(later or []) == (
        "<user>Hi.</><assistant>Ho.</><user>Again?</><assistant>"
    )
    assert second.conversations[0].prompt([answer, answer]) is None
    assert len(Questions(files).read(chat_target, encoder, 1)[0].conversations) == 1


def test_the_mode_reaches_the_template(chat_target: Path, tmp_path: Path) -> None:
    encoder, files = Encoder(chat_target), [lines(tmp_path / "a.jsonl", GSM8K)]
    (asked,) = Questions(files, Mode(thinking=True)).read(chat_target, encoder, 1)
    assert encoder.tokenizer.decode(asked.conversations[0].prompt([]) or []).endswith("<assistant>hm")


def test_a_template_that_refuses_a_question_names_it(chat_target: Path, tmp_path: Path) -> None:
    (chat_target / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    (asked,) = Questions([lines(tmp_path / "b.jsonl", MT_BENCH)]).read(chat_target, Encoder(chat_target), 1)
    with pytest.raises(ConfigError, match=r"mt-bench 81.*no users"):
        asked.conversations[0].prompt([])


def test_held_out_text_is_a_set_of_its_own(saved_target: Path) -> None:
    (found,) = held_out(Encoder(saved_target), 3, 10, 1)
    prompts = [each.prompt([]) for each in found.conversations]
    assert found.name == "stdlib" and [len(prompt or []) for prompt in prompts] == [10, 10, 10]


def test_later_turns_follow_the_targets_greedy_answer(make_drafter: Callable[..., Drafter]) -> None:
    """The second prompt is asked for with what the target alone wrote after the first, no token more."""
    from tiny_models import random_model

    heard: list[list[list[int]]] = []

    class Twice:
        def prompt(self, answers: list[list[int]]) -> list[int] | None:
            heard.append([list(answer) for answer in answers])
            return None if len(answers) == 2 else [5, 6, 7, *(answers[0] if answers else [])]

    made = bench(Target(random_model("qwen3"), TAPS), make_drafter(), sampled=False)
    pair = given("pair", [[5, 6, 7], [9, 8, 7]])
    alone = made.measure(pair).runs["greedy"]["target"].outputs[0].tokens
    result = made.measure(type(pair)("twice", [Twice(), pair.conversations[1]]))
    assert heard[:2] == [[], [alone[:12]]] and len(heard) == 3
    assert result.prompts == 3 == len(result.runs["greedy"]["drafter"].outputs) and not result.found
    heard.clear()
    made.ends = frozenset({alone[4]})  # the token that ends an answer is no part of it
    made.measure(type(pair)("twice", [Twice()]))
    assert heard[1] == [alone[: alone.index(alone[4])]]


def test_the_command_measures_each_set(
    chat_target: Path, tmp_path: Path, make_drafter: Callable[..., Drafter]
) -> None:
    import torch

    target = load_target(chat_target, TAPS, torch.float32, torch.device("cpu"))
    made = make_drafter(vocab_size=target.vocabulary)
    folder = checkpoint.save(tmp_path / "run", 1, made, DrafterOptimizer(made, Optimizer()), {}, keep=1)
    command = ["eval", str(folder), "--target", str(chat_target), "--new-tokens", "4", "--temperature", "0"]
    for name, rows in (("a.jsonl", GSM8K), ("b.jsonl", MT_BENCH)):
        command += ["--set", str(lines(tmp_path / name, rows))]
    result = CliRunner().invoke(app, [*command, "--json"])
    refused = CliRunner().invoke(app, [*command, "--set", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [(each["name"], each["prompts"]) for each in data["sets"]] == [("gsm8k", 2), ("mt-bench", 2)]
    assert data["all"]["prompts"] == 4 and data["lossless"] is True
    assert refused.exit_code == 2 and "none.jsonl: no such file" in refused.output
