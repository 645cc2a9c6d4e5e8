"""Predictions of layouts, the choice among them, and what a run does with it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

from trainer import config as configs
from trainer.data.batch import Batch
from trainer.errors import ConfigError
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.run.setup import assemble
from trainer.sections import TrainConfig
from trainer.topology import planning
from trainer.topology.measure import measure
from trainer.topology.plan import GIB, Layout, Rates, choose, predict, ranked
from trainer.topology.work import row_gradients
from trainer.training.loss import Sums

# One H200: a dense 23 B target and the 27 B model's drafter, 16,384-token batches of 2,048 anchors.
H200 = Rates(
    target_tokens_s=11_528,
    drafter_tokens_s=18_642,
    optimizer_s=0.0,
    gradient_bytes=0.0,
    batch_tokens=16_384,
    link_bytes_s=370e9,
    bytes_per_token=51_200,
    memory_bytes=139 * GIB,
    target_bytes=50 * GIB,
    drafter_bytes=44 * GIB,
    held_bytes=5 * GIB,
    slots=3,
    gpus=2,
)


@pytest.mark.parametrize(
    ("layout", "measured"), [(Layout("colocated", 2, 2), 14_208), (Layout("split", 1, 1), 11_674)]
)
def test_what_was_measured_on_two_gpus_is_predicted_within_two_percent(
    layout: Layout, measured: float
) -> None:
    assert predict(layout, H200).tokens_s == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "tokens_s", "bottleneck"),
    [
        (Layout("split", 5, 3), 55_926, "3 drafters"),
        (Layout("split", 4, 4), 46_112, "4 targets"),
        (Layout("threads", 5, 3), 55_926, "3 drafters"),
        (Layout("colocated", 8, 8), 56_984, "the target"),
        (Layout("split", 1, 7), 11_528, "1 target"),
    ],
)
def test_predictions(layout: Layout, tokens_s: float, bottleneck: str) -> None:
    found = predict(layout, replace(H200, gpus=8))
    assert found.tokens_s == pytest.approx(tokens_s, rel=1e-4)
    assert found.bottleneck == bottleneck


def test_a_slow_link_is_the_bottleneck_of_split_alone() -> None:
    slow = replace(H200, link_bytes_s=51_200 * 1000.0)
    assert predict(Layout("split", 1, 1), slow).bottleneck == "the link"
    assert predict(Layout("split", 1, 1), slow).tokens_s == pytest.approx(1000)
    assert (
        predict(Layout("colocated", 2, 2), slow).tokens_s == predict(Layout("colocated", 2, 2), H200).tokens_s
    )


def test_the_update_costs_every_drafter_its_optimizer_step_and_its_share_of_the_ring() -> None:
    rates = replace(H200, optimizer_s=0.1, gradient_bytes=370e9 / 10, batch_tokens=18_642)
    # 1 s of passes; 0.1 s of optimizer; 2 (n-1)/n of 0.1 s of travelling.
    assert rates.update_s(1) == pytest.approx(0.1)
    assert rates.update_s(2) == pytest.approx(0.2)
    fast = replace(rates, target_tokens_s=1e9)
    assert predict(Layout("split", 1, 1), fast).tokens_s == pytest.approx(18_642 / 1.1)
    assert predict(Layout("split", 6, 2), fast).tokens_s == pytest.approx(18_642 / (0.5 + 0.2))


def test_the_fastest_that_fits_is_taken_and_processes_before_threads() -> None:
    found = ranked(replace(H200, gpus=8))
    assert [str(each.layout) for each in found[:3]] == ["colocated on 8", "split 5:3", "threads 5:3"]
    assert len(found) == 1 + 7 + 7
    # Where both do not fit on one GPU, sharing is out.
    tight = ranked(replace(H200, gpus=8, drafter_bytes=90 * GIB))
    assert [each.layout.kind for each in tight if each.fits] == ["split"] * 7
    assert next(each for each in tight if not each.fits).layout.kind == "colocated"
    chosen = choose(tight)
    assert chosen is not None and str(chosen.layout) == "split 5:3"
    assert choose(ranked(replace(H200, memory_bytes=10 * GIB))) is None
    assert [str(each.layout) for each in ranked(replace(H200, gpus=1))] == ["colocated on 1"]


def test_colocated_ranks_share_the_optimizer_out_where_they_would_not_fit_otherwise() -> None:
    """90 GiB of drafter, 40 of them moments: an eighth of those on each of eight."""
    tight = replace(H200, gpus=8, drafter_bytes=90 * GIB, moment_bytes=40 * GIB)
    found = predict(Layout("colocated", 8, 8), tight)
    assert found.fits and found.shares and found.needs_bytes == pytest.approx((50 + 90 - 35) * GIB)
    assert predict(Layout("colocated", 1, 1), tight).needs_bytes == 140 * GIB
    assert not predict(Layout("split", 5, 3), tight).shares
    roomy = predict(Layout("colocated", 8, 8), replace(tight, drafter_bytes=44 * GIB))
    assert roomy.fits and not roomy.shares and roomy.needs_bytes == 94 * GIB
    assert planning.why(ranked(tight)).startswith(
        "colocated on 8: 56,985 tokens/s, held back by the target; it fits with the optimizer shared out: "
        "105.0 GiB a GPU"
    )


def test_memory_is_the_fullest_gpus() -> None:
    states = 16_384 * 51_200  # of a batch
    # One drafter: its own, the target's two ends, and three slots. Three of them have a third of each slot.
    assert predict(Layout("split", 1, 1), H200).needs_bytes == 49 * GIB + 3 * states
    bare = replace(H200, target_bytes=0.0)
    assert predict(Layout("split", 5, 3), bare).needs_bytes == 49 * GIB + states
    # One that measures has all of the target.
    whole = replace(H200, held_bytes=46 * GIB)
    assert predict(Layout("split", 1, 1), whole).needs_bytes == 90 * GIB + 3 * states
    assert predict(Layout("split", 1, 1), replace(H200, drafter_bytes=1.0)).needs_bytes == 50 * GIB
    for layout in (Layout("colocated", 2, 2), Layout("threads", 1, 1)):
        assert predict(layout, H200).needs_bytes == 94 * GIB


def test_fewer_drafters_than_ranks_read_and_pass_more_rows_at_once() -> None:
    """Measured was a quarter of a batch; two drafters have half of it each."""
    four = replace(H200, gpus=4, bytes_per_token=0.0, target_pass_bytes=8 * GIB, drafter_pass_bytes=3 * GIB)
    assert predict(Layout("colocated", 4, 4), four).needs_bytes == 94 * GIB
    assert predict(Layout("split", 2, 2), four).needs_bytes == (50 + 8) * GIB
    assert predict(Layout("split", 2, 2), replace(four, target_bytes=0)).needs_bytes == (44 + 3 + 5) * GIB
    assert predict(Layout("threads", 3, 1), four).needs_bytes == (94 + 3 * 11) * GIB


def test_the_choice_is_explained() -> None:
    assert planning.why(ranked(replace(H200, gpus=8))) == (
        "colocated on 8: 56,985 tokens/s, held back by the target; split 5:3 would reach 98% of that"
    )
    tight = planning.why(ranked(replace(H200, gpus=8, drafter_bytes=90 * GIB)))
    assert tight.endswith("colocated on 8 would be faster and needs 140.0 GiB a GPU")
    assert planning.why(ranked(replace(H200, memory_bytes=10 * GIB))).startswith(
        "nothing fits: split 1:1 needs"
    )


@pytest.mark.parametrize(
    ("rates", "topology", "layout"),
    [
        (replace(H200, gpus=8), "colocated", {"queue": 3, "ranks": 8}),
        (
            replace(H200, gpus=8, drafter_bytes=90 * GIB),
            "split",
            {"queue": 3, "ranks": None, "targets": 5, "drafters": 3},
        ),
        (
            replace(H200, gpus=8, drafter_bytes=90 * GIB, moment_bytes=40 * GIB),
            "colocated",
            {"queue": 3, "ranks": 8, "shard_optimizer": "on"},
        ),
    ],
)
def test_topology_auto_trains_with_the_layout_that_was_chosen(
    rates: Rates, topology: str, layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    section = {"target": {"path": "t"}, "topology": "auto", "layout": {"queue": 3}, "seed": 5}
    recipe.write_text(yaml.safe_dump({"name": "r", "train": section}))
    answer = json.dumps(planning.as_json(rates, ranked(rates)))

    def run(argv: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        assert argv[1:] == ["-m", "trainer", "plan", str(recipe), "--json"]
        return subprocess.CompletedProcess(argv, 0, answer)

    monkeypatch.setattr(subprocess, "run", run)
    resolved = yaml.safe_load(planning.resolve_auto(recipe, tmp_path).read_text())
    assert resolved == {
        "name": "r",
        "train": {"target": {"path": "t"}, "topology": topology, "layout": layout, "seed": 5},
    }
    taken = choose(ranked(rates))
    assert taken is not None
    said = planning.against_plan(tmp_path, 0.97 * taken.tokens_s)
    assert said is not None and said.startswith(f"{taken.layout}: ") and "97.0% of the predicted" in said


AUTO = {"target": {"path": "t"}, "token_budget": 4096, "topology": "auto", "budget": {"steps": 3}} | {
    "drafter": {"layers": 1, "block_size": 4, "taps": [0, 2], "mask_token": "<|mask|>"},
    "data": {"row_tokens": 1024},
    "objective": {"gamma": 3.0},
}
"""Four rows a step."""


@pytest.mark.parametrize(
    ("keys", "kind", "reason"),
    [
        ({"execution": "compiled"}, "threads", "train.execution: of the topologies of processes"),
        ({"layout": {"shard_optimizer": "on"}}, "split", "train.layout.shard_optimizer: "),
        ({"target": {"path": "t", "attention": "flex"}}, "threads", "train.target.attention: flex compiles"),
        ({"policy": {"mode": "reduce-overhead"}}, "threads", "train.policy: known to break with torch"),
    ],
)
def test_auto_takes_no_layout_that_the_rest_of_the_recipe_does_not_go_with(
    keys: dict[str, Any], kind: str, reason: str
) -> None:
    def reasons(section: dict[str, Any]) -> dict[str, str]:
        found = ranked(H200, lambda layout: planning.against(section, layout, "2.11.0", True))
        assert choose(found) is not None
        return {str(each.layout): each.against for each in found}

    assert set(reasons(AUTO).values()) == {""}
    told = {layout: why for layout, why in reasons(AUTO | keys).items() if why}
    assert {layout.split()[0] for layout in told} - {"threads"} == {kind} - {"threads"}
    assert all(why.startswith(reason) for layout, why in told.items() if layout.startswith(kind))


def test_more_drafters_than_rows_are_not_planned() -> None:
    eight = replace(H200, gpus=8)
    found = ranked(eight, lambda layout: planning.against(AUTO, layout, "2.11.0", True))
    usable = {str(each.layout) for each in found if not each.against}
    assert usable == {f"{kind} {8 - few}:{few}" for kind in ("split", "threads") for few in (1, 2, 3, 4)}
    assert "8 ranks for a batch of 4 rows" in next(
        each.against for each in found if "colo" in str(each.layout)
    )
    none = ranked(eight, lambda _: "execution: not here")
    assert choose(none) is None and planning.why(none).startswith("the recipe goes with no layout; ")


def test_nothing_that_fits_and_a_measurement_that_failed_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(H200, memory_bytes=10 * GIB)
    answers = [(0, json.dumps(planning.as_json(small, ranked(small)))), (2, "")]
    for code, text in answers:
        monkeypatch.setattr(
            subprocess,
            "run",
            lambda argv, code=code, text=text, **given: subprocess.CompletedProcess(argv, code, text),
        )
        with pytest.raises(ConfigError, match="no layout fits" if code == 0 else "could not be measured"):
            planning.resolve_auto(tmp_path / "recipe.yaml", tmp_path)


def test_a_measurement_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr("trainer.topology.planning.sys.executable", str(sleeper))
    monkeypatch.setattr(planning, "PLAN_S", 0.3)
    with pytest.raises(ConfigError, match="not measured within 0 s"):
        planning.resolve_auto(tmp_path / "recipe.yaml", tmp_path)


def test_a_run_that_was_not_planned_says_nothing_of_it(tmp_path: Path) -> None:
    assert planning.against_plan(tmp_path, 1.0) is None


@pytest.mark.parametrize(("micro_rows", "passes"), [(None, 2), (1, 1), (4, 2)])
def test_rates_are_measured_of_the_recipes_own_models(
    saved_target: Path, monkeypatch: pytest.MonkeyPatch, micro_rows: int | None, passes: int
) -> None:
    read, learnt = set[int](), set[tuple[int, int | None]]()
    states = Target.states

    def reading(self: Target, tokens: Tensor, *others: Any, **named: Any) -> States:
        read.add(len(tokens))
        return states(self, tokens, *others, **named)

    def learning(step: Any, config: TrainConfig, batch: Batch, *others: Any) -> Sums:
        learnt.add((len(batch.rows), config.micro_rows))
        return row_gradients(step, config, batch, *others)

    monkeypatch.setattr(Target, "states", reading)
    monkeypatch.setattr("trainer.topology.measure.row_gradients", learning)
    config = configs.load(
        {
            "target": {"path": str(saved_target)},
            "device": "cpu",
            "threads": 1,
            "token_budget": 96,
            "micro_rows": micro_rows,
            "precision": "float32",
            "drafter": {"layers": 1, "block_size": 4, "taps": [0, 2], "mask_token": "<|mask|>"},
            "data": {"row_tokens": 24, "continuations": False, "states": "online"},
            "objective": {"anchors_per_document": 4, "gamma": 3.0},
            "layout": {"targets": 2, "drafters": 1},
        }
    )
    parts = assemble(config, lambda text: None)
    rates = measure(config, parts.target, parts.drafter, None, 0.0, lambda text: None)
    assert rates.gpus == 3 and rates.batch_tokens == 96
    assert rates.bytes_per_token == 2 * 32 * 4  # taps, hidden size, float32
    assert rates.held_bytes > rates.gradient_bytes and rates.slots == 3  # it would measure
    assert rates.target_tokens_s > 0 and rates.drafter_tokens_s > 0 and rates.link_bytes_s > 0
    assert len(ranked(rates)) == 5
    # A colocated rank's share of four rows on three: the target reads it whole, the drafter by micro rows.
    assert read == {2} and learnt == {(2, passes)}
    assert (rates.drafter_pass_bytes == 0) == (micro_rows is not None) and rates.target_pass_bytes > 0
