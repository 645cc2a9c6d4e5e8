"""Going on with another recipe, target, data or code than a checkpoint's: what is refused, what may differ.

Run: python -m pytest tests/trainer/resume/test_what_differs.py
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved_runs import at, losses, train
from test_kill_and_resume import STEPS, section

from trainer import config as configs
from trainer.checkpoint.identity import differences
from trainer.checkpoint.resume import FREE
from trainer.errors import ConfigError
from trainer.training.schedule import lr_factor


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"optimizer": {"lr": 0.02}}, r"train\.optimizer\.lr: 0\.01 there, 0\.02 here"),
        ({"seed": 7}, r"train\.seed: 0 there, 7 here"),
        ({"budget": {"steps": 40}}, r"train\.budget\.steps: 24 there, 40 here"),
        ({"token_budget": 48}, r"train\.token_budget: 96 there, 48 here"),
    ],
)
def test_another_recipe_is_refused_with_what_differs(
    old: Path, target: Path, changes: dict[str, Any], differs: str
) -> None:
    with pytest.raises(ConfigError, match=differs) as caught:
        train(section(target, **changes), old, old)
    assert "another recipe or data" in caught.value.what and "--allow-changes" in caught.value.next


def test_where_and_how_it_runs_may_differ(old: Path, finished: Path, target: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(target, tmp_path / "moved")
    made = section(moved)
    changes = {
        "report_every_s": 1e6,
        "checkpoint": {"keep": 1},
        "micro_rows": 4,
        "execution": "eager",
        "target": {**made["target"], "attention": "sdpa", "compile": "off"},
        # What a message on too little memory, or on too many bad rows or steps, names to be changed.
        "objective": {**made["objective"], "anchors_per_pass": 3, "loss_chunk": 7},
        "data": {**made["data"], "max_bad_rows": 3},
        "optimizer": {**made["optimizer"], "max_bad_steps": 3},
    }
    said = train({**made, **changes}, tmp_path / "new", at(old, STEPS - 2))
    assert not [line for line in said if "WARNING" in line]
    mine, theirs = (
        load_file(at(folder, STEPS) / "model.safetensors") for folder in (tmp_path / "new", finished)
    )
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("part", "differs"),
    [
        ({"layers": 3}, r"layers\.2\.input_layernorm\.weight: nothing there, \[32\] by adamw here"),
        ({"layers": 1}, r"layers\.1\.input_layernorm\.weight: \[32\] by adamw there, nothing here"),
        ({"taps": [0, 2]}, r"fc\.weight: \[32, 96\] by muon there, \[32, 64\] by muon here"),
        (
            {"groups": [{"name": "all", "match": ["*"]}]},
            r"fc\.weight: \[32, 96\] by muon there, .* by adamw here",
        ),
    ],
)
def test_no_permission_makes_weights_and_moments_fit_others(
    old: Path, target: Path, tmp_path: Path, part: dict[str, Any], differs: str
) -> None:
    made = section(target)
    key = "optimizer" if "groups" in part else "drafter"
    with pytest.raises(ConfigError, match=differs) as caught:
        train({**made, key: {**made[key], **part}}, tmp_path / "new", at(old, STEPS), allow=True)
    assert caught.value.where == str(at(old, STEPS)) and "init: drafter" in caught.value.next


def test_another_target_or_other_rows_are_refused_with_what_differs(
    old: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=r"target\.sha256: '[0-9a-f]{64}' there, '[0-9a-f]{64}' here"):
        train(section(other), tmp_path / "new", at(old, STEPS))
    monkeypatch.setattr("trainer.data.prompts.identity", lambda held_out: {"files": 3})
    with pytest.raises(ConfigError, match=r"data\.files: \d+ there, 3 here"):
        train(section(target), tmp_path / "newer", at(old, STEPS))


def test_changes_may_be_allowed_and_are_said(old: Path, target: Path, tmp_path: Path) -> None:
    longer = section(target, budget={"steps": STEPS + 4})
    said = train(longer, tmp_path / "new", at(old, STEPS), allow=True)
    assert "WARNING: other than in the checkpoint: train.budget.steps: 24 there, 28 here" in said
    entries = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    rates = {entry["step"]: entry["lr"] for entry in entries if "lr" in entry}
    peak, schedule = longer["optimizer"]["lr"], configs.load(longer).schedule
    assert rates == {  # the longer run's own, from the step that is reached
        step + 1: pytest.approx(peak * lr_factor(schedule, step, step / (STEPS + 4), 2))
        for step in range(STEPS, STEPS + 4)
    }
    assert sorted(losses(tmp_path / "new")) == list(range(STEPS + 1, STEPS + 5))


def test_other_code_is_said_and_allowed(old: Path, target: Path, tmp_path: Path) -> None:
    facts = json.loads((at(old, STEPS) / "trainer.json").read_text())
    from trainer.checkpoint import resume

    said: list[str] = []
    other = {**facts["code"], "torch": "2.0.0"}
    resume.check_same(at(old, STEPS), facts, {"code": other}, False, said.append)
    (line,) = said
    assert line.startswith("WARNING: other code than the checkpoint's: torch: ")


def test_a_key_that_came_after_a_checkpoint_is_its_default_there(
    old: Path, target: Path, tmp_path: Path
) -> None:
    """Newer code with one more key still goes on with what older code has saved."""
    saved = at(old, STEPS)
    facts = json.loads((saved / "trainer.json").read_text())
    del facts["train"]["target"]["compile"], facts["train"]["execution"], facts["train"]["optimizer"]["beta2"]
    rewritten(saved, facts)
    train(section(target), old, old)
    other = section(target)
    other["optimizer"] = {**other["optimizer"], "beta2": 0.99}
    with pytest.raises(ConfigError, match=r"train\.optimizer\.beta2: 0\.95 there, 0\.99 here"):
        train(other, old, old)


def rewritten(folder: Path, facts: dict[str, Any]) -> None:
    """A sound checkpoint with another trainer.json."""
    text = json.dumps(facts)
    (folder / "trainer.json").write_text(text)
    table = json.loads((folder / "checksums.json").read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    table["files"]["trainer.json"] = {"bytes": len(text), "sha256": digest}
    (folder / "checksums.json").write_text(json.dumps(table))


def test_a_checkpoint_of_another_version_says_what_can_be_done_with_it(
    old: Path, target: Path, tmp_path: Path
) -> None:
    saved = at(old, STEPS)
    rewritten(saved, {**json.loads((saved / "trainer.json").read_text()), "version": 1})
    with pytest.raises(ConfigError, match="it is of version 1, this trainer reads 2") as caught:
        train(section(target), old, old)
    assert caught.value.where == str(saved) and f"init_from: {saved}" in caught.value.next
    begun = section(target, budget={"steps": 2})
    begun["drafter"] = {**begun["drafter"], "init": "drafter", "init_from": str(saved)}
    train(begun, tmp_path / "new")  # which works


def test_a_store_is_known_by_what_is_in_it_and_not_by_its_folder() -> None:
    there = {"store": "5f0c9be14fd7a3e2", "inputs": [{"sha256": "a"}]}
    for here, wanted in (
        ({**there, "store": "mine"}, []),
        ({**there, "inputs": [{"sha256": "b"}]}, ["data.inputs[0].sha256: 'a' there, 'b' here"]),
    ):
        assert differences({"data": there}, {"data": here}, FREE) == wanted


def test_of_long_values_that_differ_the_beginning_is_told() -> None:
    (line,) = differences({"template": "x" * 9000}, {"template": "y" * 9000})
    assert line.startswith("template: 'xxx") and "... there, 'yyy" in line and len(line) < 300


def test_differences_are_named_by_key() -> None:
    there = {"a": {"b": 1, "list": [1, 2]}, "same": "x", "free": {"c": 1}}
    here = {"a": {"b": 2, "list": [1]}, "same": "x", "free": {"c": 2}, "new": True}
    assert differences(there, here, ("free",)) == [
        "a.b: 1 there, 2 here",
        "a.list[1]: 2 there, 'nothing' here",
        "new: 'nothing' there, True here",
    ]
