"""A recipe that names a prepared store: what is trained on, and what its checkpoints say of it.

Run: python -m pytest tests/trainer/data/test_train_on_store.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_store import TEMPLATE, make_store

from trainer import config as configs
from trainer.data.dataset import build
from trainer.data.prepare import Tolerance, prepare
from trainer.data.reader import Settings
from trainer.errors import ConfigError, DataError
from trainer.model.target import load_target
from trainer.process.runfiles import RunFiles
from trainer.run.train import run


def section(target: Path, folder: Path, **data: Any) -> dict[str, Any]:
    return {
        "target": {"path": str(target)},
        "token_budget": 128,
        "threads": 1,
        "drafter": {
            "layers": 2,
            "block_size": 4,
            "taps": [0, 2, 4],
            "mask_token": "<|mask|>",
            "init": "target",
        },
        "data": {
            "source": "store",
            "store": str(folder),
            "continuations": False,
            "states": "online",
            "row_tokens": 64,
            **data,
        },
        "objective": {"anchors_per_document": 4, "gamma": 3.0},
        "budget": {"steps": 6},
        "report_every_s": 0.0,
        "evaluate": {"prompts": 0},
    }


def test_a_run_trains_on_the_store_and_its_checkpoints_say_so(tmp_path: Path, saved_target: Path) -> None:
    store = make_store(tmp_path, saved_target)
    said: list[str] = []
    config = configs.load(section(saved_target, store.folder))
    run(config, RunFiles(tmp_path / "run"), said.append)
    assert any(f"from store {store.folder.name}: 24 documents" in line for line in said)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-0000006")
    facts = json.loads((saved / "trainer.json").read_text())["data"]
    assert facts["store"] == store.folder.name and facts["inputs"] == store.identity["inputs"]
    assert facts["template"] == {**store.identity["template"], "template": TEMPLATE, "thinking": True}


def test_batches_are_the_stores_rows_with_the_targets_states(
    tmp_path: Path, make_target: Any, saved_target: Path
) -> None:
    store = make_store(tmp_path, saved_target)
    target = load_target(saved_target, (0, 2, 4), torch.float32, torch.device("cpu"))
    config = configs.load(section(saved_target, store.folder))
    data = build(config, target, None, lambda text: None, lambda: None)
    order = data.order(config.seed)
    assert order(3, 2).tolist() == [6, 7]
    batch, bad = data.batch(order(3, 2), target)
    wanted = data.rows[torch.tensor([6, 7])]
    for part, other in zip(batch.rows.parts(), wanted.parts(), strict=True):
        assert torch.equal(part, other)
    states = target.states(wanted.tokens, wanted.positions, wanted.documents)
    assert torch.equal(batch.states.taps, states.taps) and bad is not None and not bad.any()
    assert data.needed_width(4) >= 4


def test_stores_that_do_not_fit_are_refused(tmp_path: Path, saved_target: Path) -> None:
    store = make_store(tmp_path, saved_target)
    with pytest.raises(ConfigError, match="no prepared store there"):
        build(configs.load(section(saved_target, tmp_path)), None, None, print, lambda: None)  # type: ignore[arg-type]
    tokenizer = saved_target / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(ConfigError, match="was prepared with another tokenizer") as caught:
        build(configs.load(section(saved_target, store.folder)), None, None, print, lambda: None)  # type: ignore[arg-type]
    assert caught.value.where == "train.data.store" and "trainer prepare --target" in caught.value.next


@pytest.mark.parametrize("width", [None, 4])
def test_a_store_in_which_no_block_can_start_is_refused(
    tmp_path: Path, saved_target: Path, width: int | None
) -> None:
    """Each answer is one token: the run would go to its end with a loss of 0, having learnt nothing."""
    source = tmp_path / "a.jsonl"
    source.write_text('{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}\n' * 9)
    store = prepare([source], Settings(str(saved_target)), tmp_path / "data", Tolerance(rows=0), say=print)
    made = section(saved_target, store.folder)
    made["objective"] = {**made["objective"], "anchors_per_row": width}
    with pytest.raises(DataError, match="no block can start anywhere"):
        run(configs.load(made), RunFiles(tmp_path / "run"), lambda text: None)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"store": None}, "train.data.store: needed, the folder that prepare printed"),
        ({"continuations": True}, "train.data.continuations: a store's rows are read as they are"),
        ({"states": "cached"}, "train.data.states: a store's rows change with every epoch"),
        (
            {"source": "stdlib"},
            "train.data.store: counts only with data.source: store; here data.source is stdlib",
        ),
        ({"long": "cut"}, "train.data.long: 'cut' is not one of split, refuse"),
    ],
)
def test_the_recipe_is_held_to_what_a_store_can(changes: dict[str, Any], problem: str) -> None:
    assert any(each.startswith(problem) for each in configs.check(section(Path("t"), Path("s"), **changes)))
    assert configs.check(section(Path("t"), Path("s"))) == []
