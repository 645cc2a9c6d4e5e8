"""Runs of several processes on one machine: as exact as one, ended by a signal, left by no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from faulty_runs import LIMIT_S, Layout, alive, colocated, losses, section, start, step_of, wait_for_step

from trainer import config as configs
from trainer.checkpoint.files import listed
from trainer.machine import process_start
from trainer.process.runfiles import RunFiles
from trainer.run.train import run
from trainer.topology.launcher import Launcher
from trainer.topology.start import one_gpu_at_most


def test_two_ranks_then_three_train_as_one_process_does(saved_target: Path, tmp_path: Path) -> None:
    run(configs.load(section(saved_target, colocated(1), 8)), RunFiles(tmp_path / "alone"), lambda text: None)
    wanted = losses(tmp_path / "alone")
    assert len(wanted) == 8
    folder = tmp_path / "ranks"
    for ranks, steps, options in ((2, 5, ()), (3, 8, ("--resume", str(folder), "--allow-changes"))):
        process = start(folder, section(saved_target, colocated(ranks), steps), *options, forked=ranks == 3)
        text, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, text
        assert alive(folder) == []
    assert losses(folder) == pytest.approx(wanted, rel=1e-5)
    # One of the ranks saves, reports and tells.
    assert [path.name for path in listed(folder / "checkpoints")] == ["step-0000008", "step-0000005"]
    beat = json.loads((folder / "heartbeat.json").read_text())
    assert beat["phase"] == "done" and beat["step"] == 8 and "rank 2 MainThread" in beat["threads"]
    assert not (folder / "root_cause.json").exists()


@pytest.mark.parametrize(
    ("number", "to_all", "ranks"),
    [
        *((each, each == signal.SIGTERM, n) for each in (signal.SIGTERM, signal.SIGKILL) for n in (1, 2)),
        (signal.SIGHUP, True, 1),
        (signal.SIGHUP, False, 2),
    ],
)
def test_a_signal_to_the_launcher(
    number: signal.Signals, to_all: bool, ranks: int, saved_target: Path, tmp_path: Path
) -> None:
    """SIGTERM: the first rank saves, and all leave; also if every process was told, as by whoever stops a
    whole service, and the launcher last. SIGHUP, too: a closing terminal tells all that it started. SIGKILL:
    no rank outlives the launcher.
    """
    folder = tmp_path / "run"
    process = start(folder, section(saved_target, colocated(ranks), 100_000), forked=True)
    wait_for_step(folder, process)
    assert len(alive(folder)) == ranks
    for pid in alive(folder) if to_all else []:
        os.kill(pid, number)
    process.send_signal(number)
    text, _ = process.communicate(timeout=LIMIT_S)
    kills = number == signal.SIGKILL
    assert process.returncode == (-9 if kills else 128 + number), text
    end = time.monotonic() + 30
    while alive(folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(folder) == []
    saved = listed(folder / "checkpoints")
    assert len(saved) == (0 if kills else 1), text
    assert not (folder / "root_cause.json").exists()


def test_ranks_that_have_nowhere_to_meet_are_told_so(saved_target: Path, tmp_path: Path) -> None:
    """In a container whose loopback interface is down, or knows IPv6 alone."""
    content = section(saved_target, colocated(2), 2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"name": "tiny", "train": content}))
    apart = ["unshare", "--user", "--map-root-user", "--net"]
    done = subprocess.run(
        [*apart, sys.executable, "-m", "trainer", "train", str(recipe)],
        env=os.environ | {"DFLASH_RUN_DIR": str(tmp_path / "run")},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the processes of a run meet at 127.0.0.1, and nothing can be re")
    assert "next: bring the loopback interface up" in done.stderr and "Traceback" not in done.stderr
    assert "nothing can be reached" in json.loads((tmp_path / "run" / "root_cause.json").read_text())["error"]


def test_split_trains_as_one_process_does(saved_target: Path, tmp_path: Path) -> None:
    run(configs.load(section(saved_target, colocated(1), 5)), RunFiles(tmp_path / "alone"), lambda text: None)
    folder = tmp_path / "split"
    process = start(folder, section(saved_target, Layout("split", 2, 2), 5), forked=True)
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, text
    assert "split: 2 target, 2 drafter" in text
    assert "only the target's embedding and head are loaded here" in text
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert alive(folder) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_output_nobody_reads_any_more_trains_on_and_saves_when_told_to(
    ranks: int, saved_target: Path, tmp_path: Path
) -> None:
    content = section(saved_target, colocated(ranks), 100_000)
    process = start(tmp_path / "run", content)
    end = time.monotonic() + LIMIT_S
    while not step_of(tmp_path / "run") and time.monotonic() < end:
        time.sleep(0.1)
    assert process.stdout is not None
    process.stdout.close()
    seen = step_of(tmp_path / "run")
    while step_of(tmp_path / "run") < seen + 3 and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143 and alive(tmp_path / "run") == []
    assert len(listed(tmp_path / "run" / "checkpoints")) == 1
    assert not (tmp_path / "run" / "root_cause.json").exists()


def test_a_stop_of_the_one_process_itself_saves(saved_target: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "run", section(saved_target, colocated(1), 100_000))
    wait_for_step(tmp_path / "run", process)
    (pid,) = alive(tmp_path / "run")
    assert pid != process.pid
    os.kill(pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143 and "stopped by SIGTERM" in text
    assert len(listed(tmp_path / "run" / "checkpoints")) == 1
    assert not (tmp_path / "run" / "root_cause.json").exists()


def test_a_stop_is_passed_on_to_a_rank_once_it_can_hear(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, 2)
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    signs = {rank: {"pid": each.pid, "start": process_start(each.pid)} for rank, each in enumerate(ranks)}
    try:
        launcher._pass_on({0: signs[0]}, signal.SIGTERM)
        assert ranks[0].wait(30) == -signal.SIGTERM and ranks[1].poll() is None
        launcher._pass_on(signs, signal.SIGTERM)
        assert ranks[1].wait(30) == -signal.SIGTERM
        assert launcher.told == {0, 1}
    finally:
        launcher.pulses.close()
        for each in ranks:
            each.kill()
            each.wait()


@pytest.mark.parametrize(
    ("visible", "alone"), [("0", True), ("", True), ("GPU-3f", True), ("0,1", False), (None, False)]
)
def test_one_gpu_is_known_without_torch(visible: str | None, alone: bool) -> None:
    assert one_gpu_at_most({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) is alone
