"""`python -m trainer train` by hand: what it leaves of a recipe that it refuses, and when it saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trainer import config as configs
from trainer.checkpoint.files import listed
from trainer.cli import _begun, app
from trainer.errors import ConfigError
from trainer.model.target_files import find_target
from trainer.process.runfiles import RunFiles
from trainer.run.train import run
from trainer.writing import lock

PROJECT = Path(__file__).parents[2]
RECIPE = """\
name: tiny
train:
  target: {path: nowhere}
  token_budgett: 96
  drafter: {mask_token_id: 1}
"""


@pytest.mark.parametrize("name", ["typo.yaml", "nope.yaml"])
def test_a_recipe_that_is_refused_is_named_and_leaves_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "typo.yaml").write_text(RECIPE)
    env = {key: value for key, value in os.environ.items() if not key.startswith("DFLASH")}
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "train", name],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    place = {"typo.yaml": "typo.yaml:4:3: train.token_budgett: unknown key", "nope.yaml": "nope.yaml: cannot"}
    assert done.stderr.startswith(f"error: {place[name]}") and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_folder_in_which_a_run_goes_on_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second's root cause would be the first's reason to save nothing when it is told to stop."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setenv("DFLASH_RUN_DIR", str(run_dir))
    held = lock(run_dir / "launcher.lock")
    done = CliRunner().invoke(app, ["train", str(PROJECT / "recipes" / "demo.yaml")])
    os.close(held)
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: {run_dir}: another process trains in this folder\n"
        "next: let it end, or name another folder in DFLASH_RUN_DIR\n"
    )
    assert [path.name for path in run_dir.iterdir()] == ["launcher.lock"]


def test_a_failure_of_an_earlier_life_is_not_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that life had saved nothing to go on from."""
    RunFiles(tmp_path).fail(ValueError("the first life's"))
    monkeypatch.setenv("DFLASH_RUN_DIR", str(tmp_path))
    _begun()
    assert not (tmp_path / "root_cause.json").exists() and (tmp_path / "root_cause_before.json").exists()


def test_a_step_that_is_kept_as_the_best_is_not_saved_again_one_later(
    saved_target: Path, tmp_path: Path
) -> None:
    content = {
        "target": {"path": str(saved_target)},
        "device": "cpu",
        "threads": 1,
        "token_budget": 48,
        "precision": "float32",
        "drafter": {"layers": 1, "block_size": 4, "taps": [0, 2], "mask_token": "<|mask|>"},
        "data": {"rows": 4, "row_tokens": 24, "continuations": False, "states": "online"},
        "objective": {"anchors_per_document": 4, "gamma": 3.0},
        "budget": {"steps": 7},
        "checkpoint": {"every_steps": 3, "keep": 9},
        "evaluate": {"prompts": 2, "prompt_tokens": 8, "new_tokens": 8, "first_tokens": 6, "every_steps": 3},
        "logging": {"trackers": []},
    }
    run(configs.load(content), RunFiles(tmp_path / "run"), lambda text: None)
    names = [path.name for path in listed(tmp_path / "run" / "checkpoints")]
    assert names == ["step-0000007", "step-0000006", "step-0000003"]


def test_a_run_begins_by_saying_what_nothing_will_read(
    saved_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"train:\n  target: {{path: {saved_target}}}\n  drafter: {{mask_token_id: 1}}\n  device: cpu\n"
        "  layout:\n    queue: 4\n"
    )
    monkeypatch.setenv("DFLASH_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("trainer.cli.launch", lambda *_: None)
    done = CliRunner().invoke(app, ["train", str(recipe)])
    assert done.exit_code == 0, done.output
    said = f"{recipe}:6:5: train.layout.queue: counts only with topology: split | threads | auto; here"
    assert done.stderr.startswith(f"WARNING: {said}")
    assert said in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize("words", [["train"], ["plan"], ["prepare", "--target", "."]])
def test_ctrl_c_is_no_failure(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.recipe_file.read", interrupted)
    monkeypatch.setattr("trainer.data.cli.settings_of", interrupted)
    done = CliRunner().invoke(app, [words[0], "recipe.yaml", *words[1:]])
    assert done.exit_code == 130 and done.stderr.startswith("stopped") and "Aborted" not in done.stderr


@pytest.mark.parametrize(
    "nowhere",  # what nobody can use, root neither
    ["x" * 300, "few.jsonl", "few.jsonl/below", "/proc/nothing", "lost/below", "ring/below"],
    ids=["long", "file", "file above", "proc", "link to nothing above", "ring of links above"],
)
@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "few.jsonl", "--target", "TARGET", "--out", "NOWHERE"],
        ["prepare", "NOWHERE.jsonl", "--target", "TARGET"],
        ["prepare", "few.jsonl", "--target", "NOWHERE"],
        ["regenerate", "few.jsonl", "--target", "TARGET", "--out", "NOWHERE"],
        ["data", "show", "NOWHERE"],
        ["train", "good.yaml"],
        ["eval", "NOWHERE", "--target", "TARGET"],
        ["export", "TARGET", "NOWHERE"],
        ["import", "TARGET", "NOWHERE"],
    ],
    ids=lambda words: " ".join(words)[:24],
)
def test_a_place_that_cannot_be_used_is_told_by_every_command(
    words: list[str], nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_RUN_DIR", nowhere)
    (tmp_path / "lost").symlink_to("away")
    (tmp_path / "ring").symlink_to("ring")
    (tmp_path / "few.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "good.yaml").write_text(RECIPE.replace("budgett", "budget"))
    target = str(PROJECT / "recipes/demo/target")
    words = [word.replace("NOWHERE", nowhere).replace("TARGET", target) for word in words]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code in (1, 2)
    assert "error: " in done.output and "Traceback" not in done.output


def test_a_short_h_is_help_as_with_dflashctl() -> None:
    for words in (["-h"], ["train", "-h"], ["data", "show", "-h"]):
        assert CliRunner().invoke(app, words).exit_code == 0


def test_a_target_is_missed_by_the_name_that_it_was_given_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    with pytest.raises(ConfigError) as caught:
        find_target("recipes/demo", named_by="--target")
    assert str(caught.value) == (
        f"--target: no target (config.json) at {PROJECT / 'recipes/demo'}\nnext: check the path"
    )
    with pytest.raises(ConfigError, match=r"train\.target\.path: .*\n.*deploy\.include"):
        find_target("recipes/demo")


def test_every_option_of_every_command_says_what_it_is() -> None:
    def mute(command: Any, path: str) -> list[str]:
        if hasattr(command, "commands"):
            return [each for name, sub in command.commands.items() for each in mute(sub, f"{path} {name}")]
        named = [] if command.hidden else command.params
        return [f"{path} {each.name}" for each in named if not getattr(each, "help", None)]

    assert typer.main.get_command(app).commands
    assert mute(typer.main.get_command(app), "trainer") == []
