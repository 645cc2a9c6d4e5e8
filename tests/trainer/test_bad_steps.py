"""A whole run with non-finite gradients: such steps are left out and told, too many of them end it.

Run: python -m pytest tests/trainer/test_bad_steps.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import small_library
from test_kill_and_resume import section
from test_resume import losses, train
from tiny_models import save_target

from trainer.errors import TrainerError
from trainer.topology import colocated
from trainer.topology.work import accumulate


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = small_library(tmp_path_factory.mktemp("text") / "library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.data.stdlib.root", lambda: folder)
        yield


def spoil(monkeypatch: pytest.MonkeyPatch, spoilt: set[int]) -> None:
    """Let these steps, from 0, have a NaN in one gradient and in the loss."""

    def one(step: Any, config: Any, batch: Any, number: int, rows: slice) -> Any:
        sums = accumulate(step, config, batch, number, rows)
        if number in spoilt:
            step.drafter.fc.weight.grad[0, 0] = torch.nan
            sums.loss.fill_(torch.nan)
        return sums

    monkeypatch.setattr(colocated, "accumulate", one)


def test_some_bad_steps_are_skipped_and_told(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {0, 3, 4})
    said = "\n".join(train(section(target, budget={"steps": 8}), tmp_path / "run"))
    assert said.count("WARNING: 1 steps with a non-finite gradient were skipped") == 3
    found = losses(tmp_path / "run")
    assert sorted(found) == [2, 3, 6, 7, 8] and all(loss > 0 for loss in found.values())
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["skipped_steps"] for entry in entries if "loss" in entry] == [1, 1, 3, 3, 3]


def test_too_many_bad_steps_in_a_row_end_the_run(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {1, *range(3, 20)})
    made = section(target, budget={"steps": 20}, optimizer={"max_bad_steps": 2})
    with pytest.raises(TrainerError, match="3 steps in a row is not finite, the last of them step 6"):
        train(made, tmp_path / "run")
    assert sorted(losses(tmp_path / "run")) == [1, 3]
