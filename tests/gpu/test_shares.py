"""Run on a machine with two GPUs: pytest -m gpu tests/gpu/test_shares.py. The optimizer shared out by NCCL,
which adds up and hands over shares alone, is the optimizer in one piece."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer" / "topology"))

from owners import hold_owners_to_one_that_owns_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_owners_of_shares_do_the_steps_of_one_that_owns_all(gpus: int, tmp_path: Path) -> None:
    if gpus < 2:
        pytest.skip("DID NOT RUN: torch sees one GPU, this needs two")
    hold_owners_to_one_that_owns_all(2, tmp_path, "cuda")
