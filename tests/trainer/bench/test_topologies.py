"""What `bench/topologies.py` makes of a run's records, and that it leaves no process behind. The whole
program runs in tests/docs.

Run: python -m pytest tests/trainer/bench/test_topologies.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer import config as configs
from trainer.bench import watched
from trainer.bench.place import MASK, make_store, make_target_folder, train_section
from trainer.bench.shapes import SHAPES
from trainer.data.dataset import open_store
from trainer.machine import process_start

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import topologies

TOY = SHAPES["toy"]


def test_the_place_is_a_recipe_whose_rows_are_one_document_each(tmp_path: Path) -> None:
    target = make_target_folder(tmp_path / "target", TOY)
    store = make_store(tmp_path / "store", target, TOY, 12, 32)
    section = train_section(TOY, target, store, 128, 32, 6, device="cpu")
    config = configs.load(section)
    rows = open_store(config)
    assert len(rows) == 12 and rows.full == 1.0 and rows.needed_width(6) == 6
    some = rows[rows.order(2, 4)]
    assert some.supervised.all() and (some.documents == some.documents[:, :1]).all()
    assert int(some.tokens.min()) > MASK and int(some.tokens.max()) < TOY.vocabulary
    assert len(some.tokens.unique()) > TOY.vocabulary / 3


def test_a_rate_is_of_windows_after_warm_up() -> None:
    # Two targets deliver together: 0.1 s and 1.9 s in turn, and a slow start.
    steps, wall = [], 0.0
    for number in range(1, 22):
        wall += 30.0 if number < 4 else 0.1 if number % 2 else 1.9
        steps.append((number, wall))
    assert watched.rate(steps, 5, 2, 100) == pytest.approx(100.0)
    assert watched.rate(steps, 20, 2, 100) is None


def test_idle_is_the_share_of_waiting_between_two_heartbeats() -> None:
    def beat(mono: float, **waited: float) -> dict[str, Any]:
        return {"mono": mono, "waited_s": {key.replace("_", " "): each for key, each in waited.items()}}

    seen = watched.Seen(
        first={"0": beat(10, hidden_states=4.0), "1": beat(10, room=1.0), "2": beat(10)},
        last={"0": beat(20, hidden_states=4.5), "1": beat(20, room=3.0), "2": beat(20, room=4.0)},
    )
    assert watched.idle(seen, "hidden states") == pytest.approx(0.05)
    assert watched.idle(seen, "room") == pytest.approx(0.3)
    assert watched.idle(watched.Seen(), "room") is None
    seen.last["0"]["peak_gib"] = {"cuda:1": 2.5}
    assert watched.peaks(seen) == {"rank 0 cuda:1": 2.5}


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("colocated", "colocated on 4"),
        ("colocated:2", "colocated on 2"),
        ("split:3:1", "split 3:1"),
        ("split", "split 2:2"),
        ("plan", "threads 1:3"),
    ],
)
def test_layouts_by_word(word: str, name: str) -> None:
    planned = {
        "chosen": "threads 1:3",
        "layouts": [
            {"layout": "split 2:2", "kind": "split", "targets": 2, "drafters": 2},
            {"layout": "split 1:3", "kind": "split", "targets": 1, "drafters": 3},
            {"layout": "threads 1:3", "kind": "threads", "targets": 1, "drafters": 3},
        ],
    }
    found = topologies.parsed(word, 4, planned)
    assert found is not None and topologies.name_of(found) == name


def test_a_word_that_is_no_layout_is_refused_and_one_without_a_plan_is_not_known() -> None:
    with pytest.raises(SystemExit, match="'split:1' is not"):
        topologies.parsed("split:1", 2, {})
    for word in ("split:0:2", "threads:one:1", "colocated:-1"):
        with pytest.raises(SystemExit, match=f"{word!r}: numbers of GPUs are whole and at least 1"):
            topologies.parsed(word, 2, {})
    assert topologies.parsed("plan", 2, {}) is None


def test_a_run_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    # A child in a session of its own, as a rank is, and a grandchild.
    inner = "import os, subprocess, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
    outer = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process_start(child) is not None
    watched.end_whole(process)
    assert process_start(child) is None and process.returncode == -9


def test_a_run_that_dies_is_told_with_its_cause(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"train": {"target": {"path": str(tmp_path)}, "tokn_budget": 1}}))
    seen, start_s = watched.watch(recipe, tmp_path / "run", 1.0, 1, 1, 60.0, dict(os.environ))
    assert seen.died is not None and "train.tokn_budget: unknown key" in seen.died
    assert start_s != start_s and seen.steps == []
