"""The `train:` section: strict, with key paths, and readable without torch.

Run: python -m pytest tests/trainer/test_train_config.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import config as configs
from trainer.errors import ConfigError
from trainer.machine import multiplies_bfloat16, usable_cores

PROJECT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {"target": {"path": "x"}, "drafter": {"mask_token_id": 1}}


def with_keys(**changes: Any) -> dict[str, Any]:
    """GOOD with dotted keys (dots as __) set."""
    section: dict[str, Any] = {key: dict(value) for key, value in GOOD.items()}
    for path, value in changes.items():
        at, *keys = path.split("__")
        if keys:
            section.setdefault(at, {})[keys[0]] = value
        else:
            section[at] = value
    return section


def test_shipped_recipes_are_good() -> None:
    for name in ("demo", "threadwarm"):
        recipe = yaml.safe_load((PROJECT / "recipes" / f"{name}.yaml").read_text())
        assert configs.check(recipe["train"]) == []


def test_the_section_is_checked_without_torch() -> None:
    code = "import sys; from trainer import config; config.check({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, timeout=60).returncode == 0


def test_defaults_and_derived_values() -> None:
    config = configs.load(GOOD)
    assert config.gamma == 7.0 and config.batch_rows == 8
    assert configs.load(with_keys(drafter__block_size=8)).gamma == 4.0
    assert configs.load(with_keys(token_budget=49152, data__row_tokens=4096)).batch_rows == 12
    cut = configs.load(with_keys(token_budget=2000, data__row_tokens=300))
    assert (cut.batch_rows, cut.batch_tokens) == (6, 1800)
    assert configs.load(with_keys(optimizer__lr="4e-3")).optimizer.lr == 0.004  # YAML 1.1 reads 4e-3 as text


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ([1], "train: expected keys and values, found a list"),
        (with_keys(drafter__layer=3), "train.drafter.layer: unknown key (did you mean layers?)"),
        (with_keys(zzz=3), "train.zzz: unknown key (known: "),
        ({"target": {}, "drafter": {"mask_token_id": 1}}, "train.target.path: needed"),
        ({"drafter": {"mask_token_id": 1}}, "train.target: needed"),
        ({"target": {"path": "x"}}, "train.drafter.mask_token: needed (or drafter.mask_token_id)"),
        (with_keys(drafter__mask_token="m"), "train.drafter.mask_token_id: given twice"),
        (with_keys(seed=True), "train.seed: expected a whole number, found true or false"),
        (with_keys(seed=1.5), "train.seed: expected a whole number, found a number"),
        (with_keys(drafter="x"), "train.drafter: expected keys and values, found text"),
        (with_keys(drafter__taps="1,2"), "train.drafter.taps: expected a list, found text"),
        (with_keys(drafter__taps=[1, "b"]), "train.drafter.taps[1]: expected a whole number, found text"),
        (with_keys(optimizer__lr=-1), "train.optimizer.lr: -1.0 is below 0.0"),
        (with_keys(optimizer__lr=float("nan")), "train.optimizer.lr: nan is below 0.0"),
        (with_keys(optimizer__lr=float("inf")), "train.optimizer.lr: expected a number, found inf"),
        (with_keys(drafter__head_dim=7), "train.drafter.head_dim: 7 is odd"),
        (
            with_keys(schedule__warmup_steps=11, budget__steps=10),
            "train.schedule.warmup_steps: 11 of a run of 10 steps",
        ),
        (
            with_keys(
                optimizer__groups=[
                    {"name": "a", "match": ["*_proj.weight"]},
                    {"name": "a", "match": ["*norm.weight"]},
                ]
            ),
            "train.optimizer.groups[1].name: 'a' is another group's, too",
        ),
        (with_keys(drafter__block_size=1), "train.drafter.block_size: 1 is below 2"),
        (with_keys(drafter__block_size=9), "train.objective.gamma: needed, block size 9 has no usual value"),
        (
            with_keys(schedule__kind="cosin"),
            "train.schedule.kind: 'cosin' is not one of cosine, constant_linear (did you mean cosine?)",
        ),
        (with_keys(token_budget=128), "train.token_budget: 128 is less than one row (data.row_tokens 256)"),
        (with_keys(micro_rows=3), "train.micro_rows: 3 does not divide the batch of 8 rows"),
        (
            with_keys(drafter__taps=[1], drafter__tap_count=1),
            "train.drafter.tap_count: counts only with drafter.taps left out",
        ),
        (
            with_keys(drafter__sliding_window=64),
            "train.drafter.sliding_window: counts only with sliding_attention",
        ),
        (
            with_keys(
                drafter__layers=2,
                drafter__layer_types=["full_attention", "sliding"],
                drafter__sliding_window=64,
            ),
            "train.drafter.layer_types[1]: 'sliding' is not one of full_attention, sliding_attention",
        ),
        (
            with_keys(drafter__layers=1, drafter__layer_types=["sliding_attention"]),
            "train.drafter.sliding_window: needed",
        ),
        (
            with_keys(
                drafter__layers=1, drafter__layer_types=["sliding_attention"], drafter__sliding_window=8
            ),
            "train.drafter.sliding_window: 8 is less than a block (16)",
        ),
        (
            with_keys(drafter__layer_types=["full_attention"]),
            "train.drafter.layer_types: 1 names for 5 layers",
        ),
        (
            with_keys(drafter__init_layers=[1] * 5),
            "train.drafter.init_layers: counts only with drafter.init: target",
        ),
        (
            with_keys(data__store="rows"),
            "train.data.store: counts only with data.source: store; here data.source is stdlib",
        ),
        (
            with_keys(objective__weighting="dpace", objective__gamma=4.0),
            "train.objective.gamma: counts only with objective.weighting: decay",
        ),
        (
            with_keys(objective__dpace_alpha=0.3),
            "train.objective.dpace_alpha: counts only with objective.weighting: dpace",
        ),
        (
            with_keys(schedule__constant_share=0.8),
            "train.schedule.constant_share: counts only with schedule.kind: constant_linear",
        ),
        (
            with_keys(drafter__init="target", drafter__init_layers=[1]),
            "train.drafter.init_layers: 1 for 5 layers",
        ),
        (with_keys(data__prompt_tokens=250), "train.data.prompt_tokens: 250 leaves no block in a row of 256"),
        (with_keys(budget={}), "train.budget: one of steps, train_s, total_s is needed"),
        (
            with_keys(optimizer__groups=[{"name": "a"}]),
            "train.optimizer.groups[0].match: needed",
        ),
    ],
)
def test_each_mistake_is_named_with_its_key(section: Any, problem: str) -> None:
    problems = configs.check(section)
    assert len(problems) == 1 and problems[0].startswith(problem), problems
    with pytest.raises(ConfigError):
        configs.load(section)


def test_all_mistakes_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load({"target": {"path": 3}, "drafter": {"mask_token_id": -1, "blok_size": 8}, "sed": 1})
    lines = str(caught.value).splitlines()
    assert len(lines) == 5 and lines[-1].startswith("next: ")


def test_a_containers_cpu_quota_counts(tmp_path: Path) -> None:
    full = usable_cores(tmp_path / "nothing")
    quota = tmp_path / "cpu.max"
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == full
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("9900000 100000\n")
    assert usable_cores(quota) == full


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("flags : fpu avx512f avx512_bf16\n", True),
        ("flags : fpu avx2\nbugs : bf16_not_a_flag\n", False),
        ("Features : fp asimd bf16\n", True),
    ],
)
def test_bfloat16_products_are_known_from_the_processors_flags(
    tmp_path: Path, text: str, wanted: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is wanted
    assert multiplies_bfloat16(tmp_path / "none") is False
