"""Runs that are ended with their first cause by any fault, in every topology; forked, but for the campaigns.

The campaigns: python -m pytest -m soak tests/trainer/topology/test_faults.py --junitxml=FILE
writes, for each fault, the seconds from it to the run's exit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from faulty_runs import CAUSES, Layout, colocated, failed_run

Record = Callable[[str, object], None]
THREADS = Layout("threads", 2, 2)
IN_A_RANK = sorted(CAUSES)
IN_A_THREAD = ["raise", "hang", "stuck", "nan", "kill", "exit-0"]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("raise:1:2", marks=pytest.mark.soak),  # below, a raise while a disk is slow
        "kill:0:1",
        "disk:1:2",
        pytest.param("nan:1:2", marks=pytest.mark.soak),  # below, in split and in threads
        # Nobody else notices: the first rank is in one long call, where it hears no signal either.
        "exit-0:1:2,stuck:0:2",
        # While a checkpoint is on its way to a slow disk.
        "raise:0:3,slow:0:1",
    ],
)
def test_a_fault_ends_the_run_with_its_cause(fault: str, saved_target: Path, tmp_path: Path) -> None:
    on_a_disk_of_its_own = fault.startswith("disk")  # which the command line is started on
    failed_run(saved_target, tmp_path / "run", fault, colocated(2), forked=not on_a_disk_of_its_own)


def test_the_target_that_makes_bad_states_is_named(saved_target: Path, tmp_path: Path) -> None:
    failed_run(saved_target, tmp_path / "run", "nan:2:2", Layout("split", 2, 1), forked=True)


@pytest.mark.parametrize(
    "fault",
    [
        "stuck:0:2",
        pytest.param("exit-0:0:1", marks=pytest.mark.soak),
        pytest.param("kill:0:3", marks=pytest.mark.soak),
    ],
)
def test_a_run_of_one_process_ends_with_its_cause(fault: str, saved_target: Path, tmp_path: Path) -> None:
    failed_run(saved_target, tmp_path / "run", fault, colocated(1), forked=True)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("raise:target-1:2", marks=pytest.mark.soak),
        "raise:drafter-0:3",
        "hang:target-0:2",
        pytest.param("stuck:drafter-1:2", marks=pytest.mark.soak),
        "nan:drafter-1:1",
    ],
)
def test_a_fault_in_a_thread_ends_the_run_with_its_cause(
    fault: str, saved_target: Path, tmp_path: Path
) -> None:
    failed_run(saved_target, tmp_path / "run", fault, THREADS, forked=True)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(50))
def test_any_of_fifty_random_faults_is_told_rightly(
    number: int, saved_target: Path, tmp_path: Path, record_property: Record
) -> None:
    generator = random.Random(number)
    kind = IN_A_RANK[number % len(IN_A_RANK)]
    split, ranks = generator.choice([(False, 2), (False, 3), (False, 4), (True, 2)])
    rank = generator.randrange(2 * ranks if split else ranks)
    fault = f"{kind}:{rank}:{generator.randrange(1, 8)}"
    layout = Layout("split", ranks, ranks) if split else colocated(ranks)
    for key, value in failed_run(saved_target, tmp_path / "run", fault, layout).items():
        record_property(key, value)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(50))
def test_any_of_fifty_random_faults_of_one_process_is_told_rightly(
    number: int, saved_target: Path, tmp_path: Path, record_property: Record
) -> None:
    """Three of four with threads: in one of them, or in the main thread."""
    generator = random.Random(1000 + number)
    layout = Layout("threads", generator.randrange(1, 4), generator.randrange(1, 4))
    who = "0"
    if number % 4 == 3:
        layout = colocated(1)
    elif number % 4:
        role = ("target", "drafter")[number % 2]
        who = f"{role}-{generator.randrange(layout.targets if role == 'target' else layout.drafters)}"
    kinds = IN_A_RANK if who == "0" else IN_A_THREAD
    fault = f"{generator.choice(kinds)}:{who}:{generator.randrange(1, 8)}"
    for key, value in failed_run(saved_target, tmp_path / "run", fault, layout).items():
        record_property(key, value)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", IN_A_RANK)
def test_a_fault_in_either_role_ends_split(
    kind: str, rank: int, saved_target: Path, tmp_path: Path, record_property: Record
) -> None:
    layout = Layout("split", 2, 2)
    for key, value in failed_run(saved_target, tmp_path / "run", f"{kind}:{rank}:2", layout).items():
        record_property(key, value)
