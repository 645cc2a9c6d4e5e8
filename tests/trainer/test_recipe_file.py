"""A recipe by hand: every problem with its place in the file, and nothing that YAML would swallow.

Run: python -m pytest tests/trainer/test_recipe_file.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import recipe_file
from trainer.errors import ConfigError

GOOD = """\
name: tiny
train:
  target: {path: x}
  drafter:
    mask_token_id: 1
"""


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        recipe_file.read(path).config()
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_every_problem_has_its_place_in_the_order_of_the_file(tmp_path: Path) -> None:
    wrong = """\
  budget: {steps: 5}
  schedule: {warmup_steps: 6, kind: cosin}
  optimizer:
    groups:
      - {name: a, match: ["*"]}
      - name: b
        match: ["*"]
        lr: 3
  token_budjet: 5
"""
    assert refusal(tmp_path, GOOD + wrong).splitlines() == [
        "recipe.yaml:7:31: train.schedule.kind: 'cosin' is not one of cosine, constant_linear (did you mean "
        "cosine?)",
        "recipe.yaml:13:9: train.optimizer.groups[1].lr: unknown key (known: algorithm, lr_scale, match, "
        "name, weight_decay)",
        "recipe.yaml:14:3: train.token_budjet: unknown key (did you mean token_budget?)",
        "next: mend these keys of the recipe",
    ]
    across = refusal(tmp_path, GOOD + wrong.replace(", kind: cosin", "").partition("  optimizer")[0])
    assert across.startswith("recipe.yaml:7:14: train.schedule.warmup_steps: 6 of a run of 5 steps")


def test_what_is_missing_is_placed_where_it_belongs(tmp_path: Path) -> None:
    assert refusal(tmp_path, "train:\n  drafter: {mask_token_id: 1}\n").startswith(
        "recipe.yaml:1:1: train.target: needed"
    )
    assert refusal(tmp_path, "train:\n  target: {path: x}\n  drafter: {}\n").startswith(
        "recipe.yaml:3:3: train.drafter.mask_token: needed"
    )
    assert refusal(tmp_path, "name: x\ntrain: 3\n").startswith("recipe.yaml:2:1: train: expected keys")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            GOOD + "  drafter: {mask_token_id: 2}\n",
            "recipe.yaml:6:3: not YAML: the key 'drafter' is given twice",
        ),
        (GOOD + "train: {}\n", "recipe.yaml:6:1: not YAML: the key 'train' is given twice"),
        (GOOD + "    layers: 010\n", "recipe.yaml:6:13: not YAML: 010 is the number 8 to YAML"),
        (
            GOOD + "  budget: {train_s: 10:30}\n",
            "recipe.yaml:6:21: not YAML: 10:30 is the number 630 to YAML",
        ),
        (GOOD + "  seed: 2024-13-45\n", "recipe.yaml: not YAML: month must be in 1..12"),
        ("[" * 5000, "recipe.yaml: nested too deeply to be a recipe"),
        ("", "recipe.yaml: the recipe has no train: section"),
    ],
)
def test_what_yaml_reads_otherwise_than_people_is_refused(tmp_path: Path, text: str, told: str) -> None:
    assert refusal(tmp_path, text).startswith(told)


def test_a_good_one_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert recipe_file.read(path).config().drafter.mask_token_id == 1


def test_a_key_that_nothing_reads_is_told_at_its_place(tmp_path: Path) -> None:
    """Refused, or said where it may be meant for another topology or another evaluation."""
    momentum = GOOD + "  optimizer:\n    lr: 0.1\n    momentum: 0.9\n"
    assert refusal(tmp_path, momentum) == (
        "recipe.yaml:8:5: train.optimizer.momentum: counts only with algorithm: muon in optimizer.groups; "
        "here no group has it, so nothing reads it: leave it out, or say 0.95, its default\n"
        "next: mend these keys of the recipe"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        GOOD
        + "  policy: {mode: inductor, tls: none}\n  evaluate: {prompts: 0, every_steps: null, every_s: 9}\n"
    )
    assert recipe_file.read(path).config().policy.mode == "inductor"
    mode, every = recipe_file.read(path).warnings()  # a default, and null, want nothing
    assert mode.startswith(f"{path}:6:12: train.policy.mode: counts only with topology: threads | auto; here")
    assert every.startswith(f"{path}:7:45: train.evaluate.every_s: counts only with evaluate.prompts above 0")
    path.write_text(path.read_text() + "  topology: threads\n")
    assert len(recipe_file.read(path).warnings()) == 1
