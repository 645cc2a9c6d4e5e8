"""Prefix-match on held-out blocks, what it promises of decoding, and a leak that only decoding shows.

Run: python -m pytest tests/trainer/test_held_out.py
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import small_library
from tiny_models import save_target

from trainer import config as configs
from trainer.checkpoint import files as checkpoint
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.process.runfiles import RunFiles
from trainer.run.held_out import HeldOut, leak, walk
from trainer.run.scatter import scatter
from trainer.run.train import run
from trainer.training.step import DrafterStep

PROJECT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = small_library(tmp_path / "library")
    monkeypatch.setattr("trainer.data.stdlib.root", lambda: folder)
    yield


def section(target: Path, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "target": {"path": str(target)},
        "token_budget": 256,
        "threads": 1,
        "precision": "float32",
        "drafter": {
            "layers": 2,
            "block_size": 4,
            "taps": [0, 2, 4],
            "mask_token": "<|mask|>",
            "init": "target",
        },
        "data": {"rows": 48, "row_tokens": 32, "prompt_tokens": 8, "batch": 48},
        "objective": {"anchors_per_document": 8, "gamma": 3.0},
        "optimizer": {"lr": 0.005},
        "budget": {"steps": 60},
        "evaluate": {
            "prompts": 8,
            "prompts_before": 1,
            "prompt_tokens": 8,
            "new_tokens": 24,
            "every_steps": 20,
            "prefix_every_steps": 10,
        },
        "logging": {"trackers": []},
    }
    return {**made, **changes}


def train(made: dict[str, Any], folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    said: list[str] = []
    run(configs.load(made), RunFiles(folder), said.append)
    return said, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_both_are_measured_in_training_and_what_is_promised_is_what_decoding_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very figures: from block to block, the training pass foretells the decoder's every pass."""
    pairs: list[tuple[float, float]] = []
    monkeypatch.setattr("trainer.run.looks.leak", lambda promised, real: pairs.append((promised, real)))
    folder = tmp_path / "run"
    said, entries = train(section(save_target(tmp_path / "target")), folder)
    assert len(pairs) == 3 and pairs[-1][1] > 1.3
    for promised, real in pairs:  # but for each text's last pass, which its end cuts short
        assert promised == pytest.approx(real, rel=0.06)
    real_at = [e["step"] for e in entries if "acceptance_length" in e and e["phase"] == "training"]
    prefix_at = [e["step"] for e in entries if "prefix_acceptance_length" in e]
    assert real_at == [20, 40, 60] and prefix_at == [10, 20, 30, 40, 50, 60]
    best = max((real, step) for (_, real), step in zip(pairs, real_at, strict=True))
    link = (folder / "checkpoints" / checkpoint.BEST).resolve()
    facts = checkpoint.read_facts(link)
    assert facts["measured"][-1][2] == best[0] and facts["schedule"]["step"] == best[1]
    plot = (folder / "acceptance.txt").read_text()
    assert "real decoding (up) against prefix-match (across)" in plot and "*" in plot
    assert any(line in said for line in plot.splitlines() if "*" in line)


def test_a_leaky_mask_is_fine_in_training_and_poor_in_decoding_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Context includes the anchor. Blocks of two whose window is two see nothing else, so it must be used.
    The self-check, which would refuse it (test_selfcheck.py), is left out.
    """
    import trainer.training.step as steps

    real = steps.bounds
    monkeypatch.setattr(
        steps, "bounds", lambda *given: dataclasses.replace(real(*given), high=real(*given).high + 1)
    )
    monkeypatch.setattr("trainer.run.rehearsal.check", lambda *given: "not checked")
    made = section(
        PROJECT / "recipes" / "demo" / "target",
        drafter={
            "layers": 1,
            "block_size": 2,
            "taps": [3],
            "mask_token": "<|mask|>",
            "layer_types": ["sliding_attention"],
            "sliding_window": 2,
            "intermediate_size": 64,
            "attention_heads": 3,
            "key_value_heads": 3,
        },
        data={"rows": 192, "row_tokens": 64, "prompt_tokens": 16, "batch": 192},
        objective={"anchors_per_document": 16, "gamma": 1.0},
        optimizer={
            "lr": 0.02,
            "groups": [
                {"name": "matrices", "match": ["*_proj.weight", "fc.weight"], "algorithm": "muon"},
                {"name": "norms", "match": ["*norm.weight"]},
            ],
        },
        schedule={"kind": "constant_linear", "warmup_steps": 5},
        budget={"steps": 130},
        evaluate={
            "prompts": 8,
            "prompts_before": 1,
            "prompt_tokens": 16,
            "new_tokens": 24,
            "every_steps": 65,
        },
    )
    said, entries = train(made, tmp_path / "run")
    prefix = [e["prefix_acceptance_length"] for e in entries if "prefix_acceptance_length" in e][-1]
    lengths = [e["acceptance_length"] for e in entries if "acceptance_length" in e]
    assert prefix > 1.35 and max(lengths) < 1.15, (prefix, lengths)
    assert any("WARNING: the training pass promises an acceptance length of" in line for line in said)
    notes = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any("trust real decoding" in note.get("text", "") for note in notes)


@pytest.mark.parametrize(
    ("promised", "real", "said"),
    [(2.0, 1.95, False), (2.0, 1.71, False), (2.0, 1.6, True), (1.2, 1.0, False), (3.0, 1.1, True)],
)
def test_when_a_leak_is_said(promised: float, real: float, said: bool) -> None:
    assert (leak(promised, real) is not None) is said


def test_the_walk_goes_from_block_to_block() -> None:
    assert walk([2, 9, 1, 3, 9, 9]) == [2, 1, 3]
    assert walk([]) == [] and walk([4]) == [4]


def test_blocks_that_the_text_ends_in_do_not_count(
    make_drafter: Callable[..., Drafter], make_target: Callable[..., Target]
) -> None:
    """Texts of 9 and 4 tokens after prompts of 5, blocks of 4 starting at the first 6: six whole, and one."""
    config = configs.load(
        {
            "target": {"path": "unused"},
            "drafter": {"mask_token_id": 1, "block_size": 4},
            "objective": {"gamma": 3.0},
        }
    )
    target = make_target()
    prompts = torch.arange(2, 12).view(2, 5)
    held = HeldOut(target, prompts, [list(range(20, 29)), [30, 31, 32, 33]], first_tokens=6, size=4)
    assert held.keep.tolist() == [[True] * 6, [True] + [False] * 5]
    assert held.anchors[0].tolist() == [5, 6, 7, 8, 9, 10] and held.anchors[1, 0] == 5
    assert held.batch.rows.tokens[0].tolist() == [*range(2, 7), *range(20, 29)]
    matched = held.match(DrafterStep(make_drafter(), target, config, 6))
    assert matched.prefix >= 1.0 and matched.promised >= 1.0


def test_the_plot_shows_every_point_and_the_diagonal() -> None:
    text = scatter([(1.0, 1.0), (2.0, 1.5), (3.0, 1.5)], "a", "b")
    lines = text.splitlines()
    assert lines[0] == "b (up) against a (across); dots: equal"
    assert lines[-1].split() == ["1.00", "3.00"]
    body = lines[1:-2]
    assert body[-1].index("0", 7) == 8  # the lowest left
    row = next(line for line in body if "*" in line)
    assert "1" in row and row.index("*") == 8 + 47 and row.index("1", 7) == 8 + round(47 / 2)
    assert sum(line.count(".") for line in body) > 40  # the diagonal, and the labels
    assert "*" in scatter([(1.0, 1.0)], "a", "b")
