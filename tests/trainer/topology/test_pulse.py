"""Signs of life in the launcher's memory, who counts as quiet, and the run's one heartbeat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.process.pace import DEADLINE_S, UNTIMED
from trainer.topology.pulse import RECORD, VARIABLE, Pulse, Pulses, Quiet, Sign, merged
from trainer.topology.rank import RankFiles

PROJECT = Path(__file__).parents[3]


@pytest.fixture
def pulses() -> Iterator[Pulses]:
    made = Pulses(3)
    yield made
    made.close()
    assert VARIABLE not in os.environ


def test_a_sign_from_another_process_arrives(pulses: Pulses) -> None:
    assert pulses.read() == {}
    body = "from trainer.topology.pulse import Pulse; Pulse(1).give({'mono': 2.5, 'phase': 'training'})"
    subprocess.run([sys.executable, "-c", body], cwd=PROJECT, check=True, timeout=60)
    assert pulses.read() == {1: {"mono": 2.5, "phase": "training", "rank": 1}}


def test_half_a_sign_is_none_and_the_one_before_it_stands(pulses: Pulses) -> None:
    mine = Pulse(2)
    mine.give({"step": 7})
    before = pulses._memory[:]
    mine.give({"step": 8, "phase": "evaluating"})
    after = pulses._memory[:]
    changed = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert changed[0] >= 2 * RECORD
    assert pulses.read()[2]["step"] == 8
    for place in changed[1:]:  # cut in every place
        pulses._memory[:] = after[:place] + before[place:]
        assert pulses.read()[2]["step"] == 8
    pulses._memory[:] = before
    assert pulses.read()[2]["step"] == 7


def test_without_a_launcher_a_rank_still_writes_its_heartbeat(tmp_path: Path) -> None:
    assert VARIABLE not in os.environ
    RankFiles(tmp_path, 1).enter("data")
    assert json.loads((tmp_path / "ranks/1/heartbeat.json").read_text())["phase"] == "data"


def test_a_rank_gives_signs_though_its_files_cannot_be_written(
    pulses: Pulses, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = RankFiles(tmp_path, 0)
    (tmp_path / "ranks/0/heartbeat.json").mkdir()  # cannot be replaced by a file
    files.enter("evaluating")
    sign = pulses.read()[0]
    assert (sign["phase"], sign["pid"]) == ("evaluating", os.getpid())
    assert sign["deadline_s"] == DEADLINE_S["evaluating"]
    assert "heartbeat.json cannot be written" in capsys.readouterr().err


def test_the_launcher_hears_of_a_step_together_with_the_deadline_that_it_sets(
    pulses: Pulses, tmp_path: Path
) -> None:
    """Steps are faster than beats, and the next beat may never come."""
    files = RankFiles(tmp_path, 1)
    files.enter("training")
    files.stepped(1)  # not timed: when it began is not known
    assert (pulses.read()[1]["step"], pulses.read()[1]["deadline_s"]) == (1, UNTIMED * DEADLINE_S["training"])
    files.stepped(2)
    assert (pulses.read()[1]["step"], pulses.read()[1]["deadline_s"]) == (2, DEADLINE_S["training"])


def sign(mono: float, deadline_s: float = 60.0) -> Sign:
    return {"mono": mono, "deadline_s": deadline_s, "phase": "training"}


def test_quiet_is_what_the_launcher_saw_of_it() -> None:
    quiet = Quiet()
    for tick in range(241):
        over = quiet.look(1000.0 + tick / 4, {0: sign(999.0), 1: sign(1000.0 + tick // 8)})
        assert over == {}
    assert quiet.look(1060.25, {0: sign(999.0), 1: sign(1060.0)}) == {0: pytest.approx(60.25)}
    assert quiet.look(1060.5, {0: sign(1060.4), 1: sign(1060.0)}) == {}


def test_a_frozen_container_and_a_starved_machine_are_no_hang() -> None:
    """The launcher wakes after an hour beside the ranks: none of that hour counts but one look's time."""
    quiet = Quiet()
    for now in (0.0, 59.0, 3600.0):  # two looks' time so far, at most a second each
        assert quiet.look(now, {0: sign(0.0)}) == {}
    for tick in range(1, 59):
        assert quiet.look(3600.0 + tick, {0: sign(0.0)}) == {}
    assert quiet.look(3659.0, {0: sign(0.0)}) == {0: pytest.approx(61.0)}


def test_another_phase_has_another_deadline() -> None:
    quiet = Quiet()
    quiet.look(0.0, {0: sign(0.0, 900.0)})
    for tick in range(1, 101):
        assert quiet.look(float(tick), {0: sign(0.0, 900.0)}) == {}
    assert quiet.look(101.0, {0: sign(100.5, 60.0)}) == {}


def beat(rank: int, mono: float, phase: str = "training", step: int | None = 5) -> dict[str, Any]:
    return {
        "rank": rank,
        "pid": 100 + rank,
        "mono": mono,
        "wall": mono + 1000,
        "phase": phase,
        "phase_since": 1.0,
        "deadline_s": 60.0 if phase == "training" else 300.0,
        "step": step,
        "metrics": {"loss": float(rank)},
        "threads": {"MainThread": True},
        "queues": {"hidden states": rank},
    }


def test_one_heartbeat_as_old_as_the_oldest_and_as_far_as_the_slowest() -> None:
    found = merged([beat(0, 50.0, step=7), beat(1, 20.0, step=5), beat(2, 40.0, step=6)], 3)
    assert found is not None
    assert (found["mono"], found["wall"], found["step"], found["pid"]) == (20.0, 1020.0, 5, 100)
    assert found["metrics"] == {"loss": 0.0}
    assert found["threads"] == {f"rank {rank} MainThread": True for rank in range(3)}
    assert found["queues"] == {f"rank {rank} hidden states": rank for rank in range(3)}


def test_ranks_that_are_done_do_not_make_the_run_look_old() -> None:
    found = merged([beat(0, 50.0, "evaluating"), beat(1, 20.0, "done")], 2)
    assert found is not None and (found["mono"], found["phase"], found["deadline_s"]) == (
        50.0,
        "evaluating",
        300.0,
    )
    found = merged([beat(0, 50.0, "done"), beat(1, 20.0, "done")], 2)
    assert found is not None and found["phase"] == "done"


def test_before_every_rank_has_beaten_there_is_no_heartbeat_of_the_run() -> None:
    assert merged([], 2) is None and merged([beat(0, 1.0)], 2) is None
