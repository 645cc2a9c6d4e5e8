"""What was measured before a stop, and what is the best, when a run goes on.

Run: python -m pytest tests/trainer/resume/test_looks_again.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from saved_runs import at, train
from test_kill_and_resume import section

from trainer.checkpoint import files as checkpoint
from trainer.errors import Stopped
from trainer.evaluation.evaluator import Evaluator
from trainer.process.runfiles import RunFiles
from trainer.run.looks import same_looks
from trainer.sections import Evaluate as EvaluateSection


def looked_at(folder: Path, step: int) -> list[int]:
    """The steps that had been looked at when this one's checkpoint was made."""
    return [number for number, *_ in checkpoint.read_facts(at(folder, step))["measured"]]


def train_until(last: int, made: dict[str, Any], folder: Path) -> None:
    """A run that is stopped after this step."""
    count = RunFiles.stepped

    def stepped(files: RunFiles, step: int) -> None:
        count(files, step)
        if step == last:
            raise Stopped("SIGTERM", 143)

    with pytest.MonkeyPatch.context() as stopping, pytest.raises(Stopped):
        stopping.setattr(RunFiles, "stepped", stepped)
        train(made, folder)


def test_a_look_that_a_stop_came_before_is_made_first(target: Path, tmp_path: Path) -> None:
    evaluate = {"prompts": 2, "every_prompts": 1, "new_tokens": 8, "every_steps": 2}
    made = section(target, evaluate=evaluate, budget={"steps": 6})
    train_until(4, made, tmp_path / "run")
    assert looked_at(tmp_path / "run", 4) == [2]
    train(made, tmp_path / "run", tmp_path / "run")
    train(made, tmp_path / "new", at(tmp_path / "run", 2))  # where it has been made already
    # The last step's look comes after its checkpoint.
    assert looked_at(tmp_path / "run", 6) == looked_at(tmp_path / "new", 6) == [2, 4]


def test_a_prefix_match_that_a_stop_came_before_is_made_first_and_once(target: Path, tmp_path: Path) -> None:
    evaluate = {"prompts": 2, "every_prompts": 1, "new_tokens": 8, "prefix_every_steps": 2}
    made = section(target, evaluate=evaluate, budget={"steps": 7})

    def matched(folder: Path) -> list[int]:
        entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [entry["step"] for entry in entries if "prefix_acceptance_length" in entry]

    train_until(4, made, tmp_path / "run")
    assert matched(tmp_path / "run") == [2]
    train(made, tmp_path / "run", tmp_path / "run")
    assert matched(tmp_path / "run") == [2, 4, 6, 7]  # the last with the last look
    train(made, tmp_path / "new", at(tmp_path / "run", 6))  # where it has been made already
    assert matched(tmp_path / "new") == [7]


def test_the_best_of_a_run_that_goes_on_for_longer_may_be_what_it_ended_with(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step's checkpoint is written before the last look; who goes on must know of that, too."""
    lengths = iter([1.25, 3.0, 2.0, 1.5])
    monkeypatch.setattr(Evaluator, "measure_greedy", lambda *arguments: next(lengths))
    evaluate = {"prompts": 2, "every_prompts": 1, "new_tokens": 8, "every_steps": 4}
    made = section(target, evaluate=evaluate, budget={"steps": 6}, checkpoint={"every_steps": 2, "keep": 1})
    root = tmp_path / "run" / "checkpoints"
    train(made, tmp_path / "run")
    assert looked_at(tmp_path / "run", 6) == [4, 6] and checkpoint.best_name(root) == "step-0000006"
    train({**made, "budget": {"steps": 10}}, tmp_path / "run", tmp_path / "run", allow=True)
    assert looked_at(tmp_path / "run", 10)[:3] == [4, 6, 8]
    assert checkpoint.best_name(root) == "step-0000006"
    checkpoint.verify(root / "best")


def test_lengths_of_other_looks_are_not_compared(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer or shorter texts, as a message on too little memory advises: an earlier best says nothing now."""
    lengths = iter([3.0, 1.25, 1.5, 1.125])
    monkeypatch.setattr(Evaluator, "measure_greedy", lambda *arguments: next(lengths))
    evaluate = {"prompts": 2, "every_prompts": 2, "new_tokens": 8, "every_steps": 4}
    made = section(target, evaluate=evaluate, budget={"steps": 12}, checkpoint={"every_steps": 4, "keep": 9})
    root = tmp_path / "run" / "checkpoints"
    train_until(5, made, tmp_path / "run")
    assert checkpoint.best_name(root) == "step-0000004"
    others = {**made, "evaluate": {**evaluate, "every_prompts": 1}}
    said = "\n".join(train(others, tmp_path / "run", tmp_path / "run"))
    assert "WARNING: looks are others than before" in said
    assert looked_at(tmp_path / "run", 12) == [8, 12] and checkpoint.best_name(root) == "step-0000012"


def test_looks_are_the_same_by_what_is_looked_at() -> None:
    here, there = EvaluateSection(), {"prompts": 24, "every_prompts": 8, "new_tokens": 128}
    for same in ({}, {"prompts": 16}, {"new_tokens": 48}, {"every_steps": 7}, {"dtype": "target"}):
        assert same_looks({**there, **same}, here), same
    for other in ({"prompts": 4}, {"every_prompts": 9}, {"new_tokens": 32}, {"prompt_tokens": 9}):
        assert not same_looks({**there, **other}, here), other
