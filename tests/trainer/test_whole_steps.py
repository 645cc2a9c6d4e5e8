"""Whole runs: non-finite gradients, of which steps are left out and told and too many end the run; passes and
a compiled step, which change no figure.

Run: python -m pytest tests/trainer/test_whole_steps.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import small_library
from saved_runs import losses, train
from test_kill_and_resume import section
from tiny_models import save_target

from trainer.checkpoint.files import read_facts
from trainer.errors import ConfigError, TrainerError
from trainer.topology import colocated
from trainer.topology.work import row_gradients
from trainer.training import execution


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
        sums = row_gradients(step, config, batch, number, rows)
        if number in spoilt:
            step.drafter.fc.weight.grad[0, 0] = torch.nan
            sums.loss.fill_(torch.nan)
        return sums

    monkeypatch.setattr(colocated, "row_gradients", one)


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


def test_bad_steps_in_a_row_are_counted_across_a_resume(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {0, 2, 3, 4})
    folder, limit = tmp_path / "run", {"max_bad_steps": 2}
    train(section(target, budget={"steps": 4}, optimizer=limit), folder)
    assert read_facts(folder / "checkpoints" / "step-0000004")["bad_steps"] == {"total": 3, "in_a_row": 2}
    with pytest.raises(TrainerError, match="3 steps in a row is not finite, the last of them step 5"):
        train(section(target, budget={"steps": 8}, optimizer=limit), folder, folder, True)


def test_passes_and_a_compiled_step_train_as_one_eager_graph_does(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With input noise, two replays, micro rows, and checkpoints on the way."""
    compile = partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(execution, "compiled", compile)
    made, few = section(target, budget={"steps": 5}), {"steps": 5}
    train(made, tmp_path / "plain")
    objective = {**made["objective"], "anchors_per_pass": 2}
    train(section(target, budget=few, objective=objective, execution="compiled"), tmp_path / "other")
    plain, other = losses(tmp_path / "plain"), losses(tmp_path / "other")
    assert sorted(plain) == [1, 2, 3, 4, 5]
    assert plain == pytest.approx(other, rel=2e-4)


def test_captured_on_a_cpu_is_refused_before_anything_is_trained(target: Path, tmp_path: Path) -> None:
    objective = {"anchors_per_document": 4, "gamma": 3.0}
    with pytest.raises(ConfigError, match="captured needs a CUDA GPU"):
        train(section(target, objective=objective, execution="captured"), tmp_path / "run")
