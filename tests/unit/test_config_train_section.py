"""The trainer's own section is checked by the trainer that travels, and only for recipes that run it.

Run: python -m pytest tests/unit/test_config_train_section.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflashctl.config.resolve import read_recipe, resolve, warnings
from dflashctl.config.train_section import check_train
from dflashctl.errors import UsageError

PROJECT = Path(__file__).parents[2]
DEMO = (PROJECT / "recipes" / "demo.yaml").read_text()


def test_another_programs_train_section_is_its_own_affair(tmp_path: Path) -> None:
    text = "version: 1\nname: x\nlaunch: {command: [python, -m, mine]}\ntrain: {anything: goes}\n"
    path = tmp_path / "recipes" / "x.yaml"
    path.parent.mkdir()
    path.write_text(text)
    assert read_recipe(path).train == {"anything": "goes"}


@pytest.mark.parametrize("place", ["elsewhere", "project/recipes/experiments", "project/notes"])
def test_a_recipe_outside_recipes_is_checked_the_same(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the trainer above it; outside any project by the one of the working folder."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "trainer").symlink_to(PROJECT / "trainer")
    path = tmp_path / place / "mine.yaml"
    path.parent.mkdir(parents=True)
    head = DEMO.partition("\ntrain:")[0].replace("name: demo", "name: mine")
    path.write_text(f"{head}\ntrain:\n  target: {{path: x}}\n  drafter: {{blok_size: 8}}\n")
    (tmp_path / "project" / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "project" / "deep")
    with pytest.raises(UsageError, match=r"train\.drafter\.blok_size"):
        read_recipe(path)
    monkeypatch.chdir(tmp_path)
    if place == "elsewhere":  # no trainer anywhere: the one in the container decides
        assert read_recipe(path).name == "mine"


def test_without_a_trainer_in_the_project_nobody_judges(tmp_path: Path) -> None:
    assert check_train({"no": "such key"}, tmp_path) == []


def test_a_broken_trainer_is_left_to_deploy_to_show(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "config.py").write_text("def broken(:\n")
    assert check_train({"no": "such key"}, tmp_path) == []


@pytest.mark.parametrize(
    "code",
    [
        "def check(): ...",
        "def check(section): return 7",
        "def check(section): return [7]",
        "def check(section): raise SystemExit(3)",
        "check = True",
        "raise SystemExit(3)",
    ],
)
def test_another_program_of_that_name_is_not_asked(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainer"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    (tmp_path / "trainer" / "config.py").write_text(code + "\n")
    try:
        assert check_train({"no": "such key"}, tmp_path) == []
        assert "trainer" in sys.modules, "it was found and asked"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "trainer"]:
            del sys.modules[name]


def test_the_projects_trainer_names_the_key_and_the_recipe_its_line(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "trainer").symlink_to(PROJECT / "trainer")
    path = tmp_path / "recipes" / "demo.yaml"
    head = DEMO.partition("\ntrain:")[0]
    path.write_text(f"{head}\ntrain:\n  target: {{path: x}}\n  drafter: {{blok_size: 8}}\n")
    line = len(path.read_text().splitlines())
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    assert caught.value.where.endswith(f"demo.yaml:{line}:13")
    assert "train.drafter.blok_size" in caught.value.what
    groups = (
        '  optimizer:\n    groups:\n      - {name: a, match: ["*"]}\n      - {name: b, match: ["*"], lr: 1}\n'
    )
    path.write_text(f"{head}\ntrain:\n  target: {{path: x}}\n  drafter: {{mask_token_id: 1}}\n{groups}")
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    assert caught.value.where.endswith(f"demo.yaml:{len(path.read_text().splitlines())}:33")
    assert "train.optimizer.groups[1].lr: unknown key" in caught.value.what


BASE = """
train:
  target: {path: x}
  drafter: {mask_token_id: 1}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "trainer").symlink_to(PROJECT / "trainer")

    def written(train: str) -> Path:
        path = tmp_path / "recipes" / "demo.yaml"
        path.write_text(DEMO.partition("\ntrain:")[0] + BASE + train)
        return path

    return written


def line_of(path: Path, word: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if word in line)


def test_a_key_that_a_variant_makes_idle_is_refused_where_it_stands(write: Callable[[str], Path]) -> None:
    path = write(
        "  data: {rows: 9}\nvariants:\n  other: {train: {seed: 3}}\n"
        "  real: {train: {data: {source: store, store: s, continuations: false, states: online}}}\n"
    )
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    assert caught.value.where.endswith(f"demo.yaml:{line_of(path, 'rows')}:10")
    assert caught.value.what.startswith("train.data.rows: counts only with data.source: stdlib; here ")
    assert caught.value.what.endswith(" (with variant real)")


def test_what_the_recipe_itself_gets_wrong_is_not_told_again_for_every_variant(
    write: Callable[[str], Path],
) -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe(
            write("  optimizer: {momentum: 0.5}\nvariants:\n  a: {train: {seed: 3}}\n  b: {train: {}}\n")
        )
    assert caught.value.what.count("momentum") == 1


def test_keys_of_another_topology_are_warned_of_for_the_tag(write: Callable[[str], Path]) -> None:
    """A recipe may keep them for its variants, so they are no mistake."""
    path = write(
        "  topology: threads\n  layout: {queue: 3}\nvariants:\n"
        "  together: {train: {topology: colocated, policy: {mode: inductor}}}\n"
    )
    recipe = read_recipe(path)
    assert warnings(resolve(recipe, "plain")) == ()
    mode, queue = warnings(resolve(recipe, "together"))
    at = f"{path}:{line_of(path, 'together')}"
    assert mode.startswith(
        f"{at}:52: variants.together.train.policy.mode: counts only with topology: threads"
    )
    assert queue.startswith(f"{path}:{line_of(path, 'queue')}:12: train.layout.queue: counts only with ")
