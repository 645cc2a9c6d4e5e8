"""A recipe can begin with a drafter that is there, if it says what that drafter is.

Run: python -m pytest tests/trainer/export/test_start.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_export import saved
from typer.testing import CliRunner

from trainer import config as configs
from trainer.cli import app
from trainer.errors import ConfigError
from trainer.export.commands import export, import_drafter
from trainer.model.drafter import Drafter
from trainer.run.setup import Assembled, assemble


@pytest.fixture
def made(make_drafter: Callable[..., Drafter], saved_target: Path) -> Drafter:
    vocabulary = json.loads((saved_target / "config.json").read_text())["vocab_size"]
    types = ("sliding_attention", "full_attention")
    return make_drafter(types, vocab_size=vocabulary, block_size=8, intermediate_size=40, attention_bias=True)


@pytest.fixture
def imported(made: Drafter, saved_target: Path, tmp_path: Path) -> Path:
    export(saved(made, tmp_path / "run"), tmp_path / "out", "hf", saved_target, dtype="float32")
    import_drafter(tmp_path / "out", tmp_path / "in", saved_target)
    return tmp_path / "in"


def start(target: Path, folder: Path, **keys: Any) -> Assembled:
    section = {"init": "drafter", "init_from": str(folder), "layers": 2, "block_size": 8, "mask_token_id": 1}
    recipe = {"target": {"path": str(target)}, "drafter": {**section, **keys}, "threads": 1}
    return assemble(configs.load(recipe), lambda text: None)


def test_training_begins_with_an_imported_drafter(made: Drafter, imported: Path, saved_target: Path) -> None:
    """With shapes that no key of a recipe tells, too: biases, an MLP of another size than the target's."""
    parts = start(saved_target, imported)
    assert parts.drafter.config.attention_bias and parts.drafter.config.intermediate_size == 40
    for name, tensor in made.state_dict().items():
        assert torch.equal(parts.drafter.state_dict()[name], tensor)
    assert parts.target.taps == [0, 2, 4]
    assert parts.drafter.config.target.name == "target"  # from now on it knows whose it is


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"layers": 3}, "train.drafter.layers: 3 in the recipe, 2 in"),
        ({"block_size": 16}, "train.drafter.block_size: 16 in the recipe, 8 in"),
        ({"mask_token_id": 5}, "train.drafter.mask_token_id: 5 in the recipe, 1 in"),
        ({"taps": [0, 2, 3]}, "train.drafter.taps: [0, 2, 3] in the recipe, [0, 2, 4] in"),
        ({"tap_count": 2}, "train.drafter.tap_count: 2 in the recipe, 3 in"),
        ({"intermediate_size": 48}, "train.drafter.intermediate_size: 48 in the recipe, 40 in"),
    ],
)
def test_a_recipe_that_says_otherwise_is_refused(
    keys: dict[str, Any], told: str, imported: Path, saved_target: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        start(saved_target, imported, **keys)
    assert f"{told} {imported}" in str(caught.value)


def test_no_drafter_there(saved_target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no drafter there"):
        start(saved_target, tmp_path / "nothing")


@pytest.mark.parametrize(
    "keys", [{"init": "drafter"}, {"init": "target", "init_from": "x"}, {"init_from": "x"}]
)
def test_the_folder_and_the_way_go_together(keys: dict[str, Any]) -> None:
    recipe = {"target": {"path": "t"}, "drafter": {"mask_token_id": 1, **keys}}
    assert any(problem.startswith("train.drafter.init_from") for problem in configs.check(recipe))


def test_the_command_prints_the_section_that_begins_with_it(
    imported: Path, saved_target: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["import", str(tmp_path / "out"), str(tmp_path / "again")])
    line = next(line for line in result.output.splitlines() if line.startswith("recipe: "))
    section = yaml.safe_load(line.removeprefix("recipe: "))["drafter"]
    recipe = {"target": {"path": str(saved_target)}, "drafter": section, "threads": 1}
    assert assemble(configs.load(recipe), lambda text: None).drafter.config.block_size == 8
