"""Run on a machine with two GPUs: pytest -m gpu tests/gpu/test_faults.py. A run on GPUs ends soon after a
fault in either role, with the cause, a status, and no process left."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
sys.path.insert(0, str(Path(__file__).parents[1] / "trainer" / "topology"))

import faulty_runs
from faulty_runs import Layout, colocated, failed_run
from tiny_models import save_target

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
SPLIT = Layout("split", 1, 1)  # rank 0 learns, rank 1 makes hidden states
GPU = {"device": "cuda", "precision": "bfloat16", "attention": "dense"}  # heads of 8 are for no kernel


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        ("raise:0:2", SPLIT),
        ("kill:0:2", SPLIT),
        ("kill:1:2", SPLIT),
        ("exit-0:1:2", SPLIT),
        ("nan:1:2", SPLIT),
        ("stuck:0:2", SPLIT),
        ("kill:1:2", colocated(2)),
        ("nan:1:2", colocated(2)),
    ],
)
def test_a_fault_ends_a_run_on_gpus(
    gpus: int, fault: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpus < 2:
        pytest.skip("DID NOT RUN: two GPUs are needed")
    real = faulty_runs.section

    def section(*arguments: Any) -> dict[str, Any]:
        return {**real(*arguments), **GPU}

    monkeypatch.setattr(faulty_runs, "section", section)
    target = tmp_path / "target"
    save_target(target)
    print(failed_run(target, tmp_path / "run", fault, layout))
