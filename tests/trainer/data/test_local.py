"""Answers by the target on this machine: batched, cached and padded ones equal plain ones, row by row.

Run: python -m pytest tests/trainer/data/test_local.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_kinds import save_chat_target
from tiny_models import target_config
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trainer.cli import app
from trainer.data.chat_template import Mode
from trainer.data.journal import Result
from trainer.data.local import Draw, LocalTarget
from trainer.data.prepare import Tolerance, prepare
from trainer.data.reader import Settings
from trainer.data.regenerate import Job, Sampling, job, regenerate
from trainer.errors import ConfigError

ENDS = list(range(1, 420, 8))  # many tokens end a turn: random weights hardly ever say one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with random weights, a tokenizer and a template."""
    folder = save_chat_target(tmp_path_factory.mktemp("local") / "target", "chatml")
    config = target_config("qwen3")
    config.vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config.eos_token_id = ENDS
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS, "temperature": 0.01}))
    return folder


def target(folder: Path, batch: int, **sampling: Any) -> LocalTarget:
    return LocalTarget(folder, Mode(), None, Sampling(**{"max_new_tokens": 24, **sampling}), batch, "cpu")


def test_a_gpu_that_torch_does_not_see_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device: torch sees no CUDA device\nnext: say auto or cpu"):
        LocalTarget(folder, Mode(), None, Sampling(), 1, "cuda")


def jobs(count: int) -> list[Job | Result]:
    old = {"role": "assistant", "content": "old"}
    rows = []
    for number in range(count):
        asked = [
            {"role": "user", "content": "what " * (number % 5 + 1) + str(turn)}
            for turn in range(1 + number % 2)
        ]
        rows.append(job(number, {"messages": [part for each in asked for part in (each, old)]}))
    return [*rows[:2], Result(99, "skipped", None, "bad"), *rows[2:]]


def results(local: LocalTarget, count: int, window: int) -> list[Result]:
    return list(local.answering(window)(iter(jobs(count)), lambda tokens: None))


def plainly(local: LocalTarget, each: Job) -> Result:
    """One row, one token at a time, without batch, padding or cache."""
    while (prompt := each.next_prompt()) is not None:
        ids = local.encoder.tokenizer.encode(local.template.render(prompt, None, True)).ids
        answer: list[int] = []
        while len(answer) < local.sampling.max_new_tokens and not (answer and answer[-1] in local.ends):
            with torch.no_grad():
                logits = local.model(torch.tensor([ids + answer]), use_cache=False).logits
            answer.append(int(logits[0, -1].argmax()))
        text = local.encoder.tokenizer.decode(answer[:-1], skip_special_tokens=False)
        if answer[-1] not in local.ends:
            return Result(each.line, "skipped", each.row, "cut", each.tokens + len(answer))
        if not text.strip():
            return Result(each.line, "skipped", each.row, "nothing", each.tokens)
        each.said += [*each.ahead.pop(0), {"role": "assistant", "content": text}]
        each.tokens += len(answer)
    return each.result()


def test_batched_answers_are_those_of_one_row_alone(folder: Path) -> None:
    local = target(folder, 4)
    local.ends = [number for number in range(420) if number % 3 == 2]  # so that greedy answers end too
    found = results(local, 14, 16)
    wanted = [each if isinstance(each, Result) else plainly(local, each) for each in jobs(14)]
    assert [each.status for each in found] == [each.status for each in wanted]
    assert [each.row for each in found] == [each.row for each in wanted]
    counted = [each.tokens for each in wanted if each.status == "success"]
    assert [each.tokens for each in found if each.status == "success"] == counted
    assert len(counted) >= 3 and found[2].line == 99
    reasons = {each.reason for each in found} - {"", "bad"}
    assert reasons <= {"the target says nothing", "cut off before its end (--max-new-tokens, or the context)"}


def test_sampled_answers_do_not_depend_on_batch_or_window(folder: Path) -> None:
    hot = {"temperature": 1.5, "top_p": 0.99, "top_k": 200, "seed": 3}
    whole = results(target(folder, 8, **hot), 12, 16)
    assert results(target(folder, 1, **hot), 12, 16) == whole
    assert results(target(folder, 3, **hot), 12, 5) == whole
    assert results(target(folder, 8, **{**hot, "seed": 4}), 12, 16) != whole
    assert sum(each.status == "success" for each in whole) >= 3


def test_drawing_follows_the_distribution() -> None:
    logits = torch.tensor([0.3, -float("inf"), 2.0, 1.0])
    draw = Draw(list(range(2000)))
    counts = torch.zeros(4)
    for _ in range(5):
        chosen = draw(torch.zeros(2000, 1), logits.expand(2000, 4))
        assert bool(((chosen == 0).sum(1) == 1).all()) and bool(((chosen == -torch.inf).sum(1) == 3).all())
        counts += torch.bincount(chosen.argmax(-1), minlength=4)
    wanted = logits.softmax(-1) * 10_000
    kept = torch.tensor([0, 2, 3])
    assert counts[1] == 0
    assert ((counts[kept] - wanted[kept]) ** 2 / wanted[kept]).sum() < 13.8  # 2 degrees of freedom


def test_an_interrupted_run_goes_on_to_the_same_answers(folder: Path, tmp_path: Path) -> None:
    old = {"role": "assistant", "content": "old"}
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": "so " * (n % 4 + 1)}, old]}) + "\n"
            for n in range(14)
        )
    )
    hot = {"temperature": 1.5, "seed": 1}

    def stops_after(count: int) -> Any:
        def answer(rows: Iterator[Job | Result], told: Any) -> Iterator[Result]:
            for number, result in enumerate(target(folder, 2, **hot).answering(4)(rows, told)):
                if number == count:
                    raise KeyboardInterrupt
                yield result

        return answer

    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    regenerate(path, whole, {}, 4, stops_after(99), lambda text: None)
    for count in (1, 6, 3):  # in the middle of a window, whose rows are then written again
        with pytest.raises(KeyboardInterrupt):
            regenerate(path, out, {}, 4, stops_after(count), lambda text: None)
    regenerate(path, out, {}, 4, stops_after(99), lambda text: None)
    assert out.read_bytes() == whole.read_bytes() and out.read_bytes()


def test_prompts_beyond_the_context_are_skipped(folder: Path) -> None:
    local = target(folder, 2)
    local.context = 40
    long = job(1, {"messages": [{"role": "user", "content": "x y z " * 30}]})
    short = job(2, {"messages": [{"role": "user", "content": "hi"}]})
    found = list(local.answering(4)(iter([long, short]), lambda tokens: None))
    assert found[0].status == "skipped" and "longer than the target's context" in found[0].reason
    assert "context" not in found[1].reason or found[1].tokens < 40


def test_the_command_writes_what_prepare_proves(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{"id": n, "messages": [{"role": "user", "content": f"say {n}"}]} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["regenerate", path, "--out", tmp_path / "out.jsonl", "--target", folder, "--device", "cpu"]
    words += ["--temperature", 1.5, "--max-new-tokens", 30, "--batch", 8]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert "20 rows: " in done.stdout and "tokens written" in done.stdout
    answers = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(answers) >= 3
    store = prepare(
        [tmp_path / "out.jsonl"],
        Settings(str(folder)),
        tmp_path / "data",
        Tolerance(share=1.0),
        say=lambda text: None,
    )
    # Random weights may say special tokens in mid-answer; what is left is whole.
    assert len(store) + store.counts["bad_rows"] == len(answers) and len(store)


def test_a_folder_without_a_model_or_an_end_is_refused(tmp_path: Path) -> None:
    bare = save_chat_target(tmp_path / "bare", "chatml")
    with pytest.raises(ConfigError, match=r"no model there \(config\.json\)"):
        target(bare, 1)
    (bare / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="cannot load the model"):
        target(bare, 1)
    (bare / "generation_config.json").unlink()
    (bare / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no token ends a turn"):
        target(bare, 1)
