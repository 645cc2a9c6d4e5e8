"""The files that a run leaves, and how it ends when told to or when a thread fails.

Run: python -m pytest tests/trainer/test_runfiles.py
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from run_programs import PROJECT, lines, program, read

from trainer import config as configs
from trainer.process.pace import DEADLINE_S, PHASES
from trainer.process.runfiles import RunFiles
from trainer.run.loading import loading_deadline_s


def test_heartbeat_says_phase_step_and_pace(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    files.enter("training")
    files.total_steps = 40
    for step in range(1, 4):
        files.stepped(step)
    files.record({"loss": 2.5, "slot_accuracy": [0.5, 0.25]})
    files.beat(force=True)
    beat = read(tmp_path / "run" / "heartbeat.json")
    assert beat["version"] == 1 and beat["pid"] == os.getpid()
    assert (beat["phase"], beat["step"], beat["total_steps"]) == ("training", 3, 40)
    assert beat["metrics"] == {"loss": 2.5} and beat["deadline_s"] == DEADLINE_S["training"] == 60.0
    assert abs(beat["wall"] - time.time()) < 60 and abs(beat["mono"] - time.monotonic()) < 60
    assert beat["phase_since"] <= beat["mono"] and beat["median_step_s"] >= 0
    assert beat["threads"]["MainThread"] is True and beat["queues"] == {}
    assert beat["waited_s"] == {} and beat["peak_gib"] == {}
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["step"] == 3 and metrics[0]["phase"] == "training"
    assert metrics[0]["slot_accuracy"] == [0.5, 0.25]
    events = lines(tmp_path / "run" / "events.jsonl")
    assert [(event["event"], event["phase"]) for event in events] == [("phase", "training")]
    assert {line["version"] for line in (*metrics, *events)} == {1}


def test_slow_steps_have_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 15 s takes a minute on a machine that four programs share, and the first compiles besides."""
    now = 1000.0
    monkeypatch.setattr("trainer.process.runfiles.time.monotonic", lambda: now)
    files = RunFiles(tmp_path)
    for phase, allowed in (("loading", 900.0), ("data", 300.0), ("training", 240.0)):
        files.enter(phase)
        assert files.pace.deadline_s == allowed
    for step, took, allowed in ((1, 9.0, 240.0), (2, 2.0, 60.0), (3, 15.0, 150.0), (4, 1.0, 150.0)):
        now += took
        files.stepped(step)
        assert files.pace.deadline_s == allowed == read(tmp_path / "heartbeat.json")["deadline_s"]
    files.enter("evaluating")
    assert files.pace.deadline_s == 120.0
    files.enter("training")
    assert files.pace.deadline_s == 150.0


def test_large_weights_have_more_time_to_load(tmp_path: Path) -> None:
    """54 GB in two files, of which a disk that gives 20 MiB a second needs 43 minutes; a small model."""
    section = {"target": {"path": str(tmp_path)}, "drafter": {"mask_token_id": 1}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    assert loading_deadline_s(configs.load(section)) == 300.0
    for number, size in ((1, 50 << 30), (2, 4 << 30)):
        with (tmp_path / f"model-{number}.safetensors").open("ab") as file:
            file.truncate(size)
    files = RunFiles(tmp_path / "run")
    files.pace.loading_s = loading_deadline_s(configs.load(section))
    files.enter("loading")
    assert read(tmp_path / "run" / "heartbeat.json")["deadline_s"] == 300.0 + 54 * 1024 / 20
    drawn = {**section, "target": {"path": str(tmp_path), "weights": "random"}}
    assert loading_deadline_s(configs.load(drawn)) == 900.0
    missing = {**section, "target": {"path": str(tmp_path / "none")}}
    assert loading_deadline_s(configs.load(missing)) == 300.0


def test_waits_add_up_by_what_was_waited_for(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for what in ("hidden states", "room 0", "hidden states"):
        with files.waiting(what):
            time.sleep(0.02)
    with pytest.raises(ValueError), files.waiting("room 0"):
        raise ValueError
    files.peaks = {"cuda:0": 1.25}
    files.beat(force=True)
    beat = read(tmp_path / "heartbeat.json")
    assert 0.04 <= beat["waited_s"]["hidden states"] < 60 and 0.02 <= beat["waited_s"]["room 0"] < 60
    assert beat["peak_gib"] == {"cuda:0": 1.25}


def test_a_main_thread_that_hangs_goes_stale(tmp_path: Path) -> None:
    """Other threads must not keep the heartbeat fresh."""
    files = RunFiles(tmp_path)
    files.enter("training")
    first = read(tmp_path / "heartbeat.json")["mono"]
    other = threading.Thread(target=time.sleep, args=(1.3,))
    other.start()
    other.join(10)
    assert read(tmp_path / "heartbeat.json")["mono"] == first
    files.beat()
    assert read(tmp_path / "heartbeat.json")["mono"] > first + 1.0


def test_a_heartbeat_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint is flushed, a flush of anything else on that disk may take as long."""
    files = RunFiles(tmp_path)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    files.enter("training")
    files.record({"loss": 1.0})
    files.beat(force=True)
    assert flushed == []
    files.summarise("headline", [], [], [], None, None)
    assert len(flushed) == 1 and read(tmp_path / "heartbeat.json")["phase"] == "training"


def test_every_phase_has_a_deadline_and_no_other_exists(tmp_path: Path) -> None:
    assert set(DEADLINE_S) == set(PHASES)
    with pytest.raises(ValueError, match="unknown phase 'trainin'"):
        RunFiles(tmp_path).enter("trainin")


def test_summary_and_root_cause(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.summarise("acceptance length 1.0 -> 2.0", ["a", "b"], [["x", "1"]], ["note"], True, 2.0)
    summary = read(tmp_path / "summary.json")
    assert summary["headline"].endswith("2.0") and summary["table"] == {
        "columns": ["a", "b"],
        "rows": [["x", "1"]],
    }
    assert (
        summary["lossless"] is True and summary["best_acceptance_length"] == 2.0 and summary["version"] == 1
    )
    try:
        raise ValueError("first")
    except ValueError as error:
        files.fail(error)
    files.fail(RuntimeError("its consequence"))
    cause = read(tmp_path / "root_cause.json")
    assert cause["error"] == "ValueError: first" and "test_runfiles.py:" in cause["where"]
    assert 'raise ValueError("first")' in cause["traceback"] and cause["phase"] == "loading"
    assert not list(tmp_path.glob("*.tmp"))


def test_an_exception_in_any_thread_ends_the_program_at_once(tmp_path: Path) -> None:
    body = "threading.Thread(target=lambda: 1 / 0, name='feeder').start()\ntime.sleep(60)\n"
    started = time.monotonic()
    done = subprocess.run(program(tmp_path, body), cwd=PROJECT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 70 and time.monotonic() - started < 45
    assert "thread feeder failed" in done.stderr and "ZeroDivisionError" in done.stderr
    assert read(tmp_path / "root_cause.json")["error"] == "ZeroDivisionError: division by zero"


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        (f"threading.Thread(target=lambda: fail({OOM!r})).start()\ntime.sleep(60)\n", 70, "RuntimeError"),
        # Of another kind: an allocator's own is one message, test_command_shortage.py.
        (f"sys.exit(guarded(lambda: fail({OOM!r}, LookupError), files.fail))\n", 1, "LookupError"),
        (f"sys.exit(guarded(lambda: fail({OOM!r}, DataError), files.fail))\n", 1, "DataError"),
    ],
)
def test_a_known_failure_is_named_in_the_log_and_in_the_root_cause(
    tmp_path: Path, body: str, code: int, error: str
) -> None:
    head = (
        "from trainer.guard import guarded\nfrom trainer.errors import DataError\n"
        "def fail(text, kind=RuntimeError): raise kind(text)\n"
    )
    done = subprocess.run(
        program(tmp_path, head + body), cwd=PROJECT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code, done.stderr
    assert ("Traceback" in done.stderr) == (error != "DataError")
    cause = read(tmp_path / "root_cause.json")
    assert cause["error"] == f"{error}: {OOM}"
    (known,) = cause["known"]
    assert known["name"] == "cuda-oom" and known["meaning"].startswith("A GPU has no room")
    assert len(known["do"]) >= 2 and known["torch"] == "any"
    told = done.stderr[done.stderr.rindex(OOM) :].splitlines()[1:]
    assert told == [f"known failure cuda-oom: {known['meaning']}", *(f"  do: {each}" for each in known["do"])]


def test_a_failure_that_nobody_knows_has_none(tmp_path: Path) -> None:
    assert RunFiles(tmp_path).fail(ValueError("tap layer 61 is out of range")) == ()
    assert read(tmp_path / "root_cause.json")["known"] == []


def test_a_root_cause_that_cannot_be_written_hides_no_failure(tmp_path: Path, capfd: Any) -> None:
    files = RunFiles(tmp_path / "run")
    (tmp_path / "run").rmdir()
    (known,) = files.fail(OSError(28, "No space left on device", "/workspace/ckpt"))
    assert known.name == "disk-full"
    assert "root_cause.json cannot be written: " in capfd.readouterr().err


def test_the_failure_of_another_process_is_seen_and_an_old_one_is_not(tmp_path: Path) -> None:
    other = RunFiles(tmp_path)
    other.fail(ValueError("rank 3 is gone"))
    assert RunFiles(tmp_path).failed_peer() is None  # it was there before this process began
    assert other.failed_peer() == "ValueError: rank 3 is gone"
    RunFiles(tmp_path).forget_failure()
    assert other.failed_peer() is None
    assert read(tmp_path / "root_cause_before.json")["error"] == "ValueError: rank 3 is gone"


def test_what_an_earlier_life_failed_of_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    RunFiles(tmp_path).fail(ValueError("the first life's"))
    later = RunFiles(tmp_path)
    later.fail(KeyError("resumed wrongly"))
    later.fail(KeyError("its consequence"))
    assert read(tmp_path / "root_cause.json")["error"] == "KeyError: 'resumed wrongly'"
    assert read(tmp_path / "root_cause_before.json")["error"] == "ValueError: the first life's"


def test_an_earlier_lifes_failure_is_told_by_its_file_and_not_by_a_clock(tmp_path: Path) -> None:
    """The clock was an hour ahead when the first life failed; in the second it is set back an hour."""
    now = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: now + 3600)
        RunFiles(tmp_path).fail(ValueError("the first life's"))
    files = RunFiles(tmp_path)
    assert files.failed_peer() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: now - 3600)
        files.fail(KeyError("mine"))
        files.fail(KeyError("its consequence"))
    assert files.failed_peer() == "KeyError: 'mine'"
