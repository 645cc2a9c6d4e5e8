"""The files that a run leaves, and how it ends when told to or when a thread fails.

Run: python -m pytest tests/trainer/test_runfiles.py
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from small_disk import on_small_disk

from trainer import config as configs
from trainer.guard import guarded
from trainer.run.loading import loading_deadline_s
from trainer.run.runfiles import DEADLINE_S, PHASES, RunFiles

PROJECT = Path(__file__).parents[2]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    monkeypatch.setattr("trainer.run.runfiles.time.monotonic", lambda: now)
    files = RunFiles(tmp_path)
    for phase, allowed in (("loading", 900.0), ("data", 300.0), ("training", 240.0)):
        files.enter(phase)
        assert files.deadline_s == allowed
    for step, took, allowed in ((1, 9.0, 240.0), (2, 2.0, 60.0), (3, 15.0, 150.0), (4, 1.0, 150.0)):
        now += took
        files.stepped(step)
        assert files.deadline_s == allowed == read(tmp_path / "heartbeat.json")["deadline_s"]
    files.enter("evaluating")
    assert files.deadline_s == 120.0
    files.enter("training")
    assert files.deadline_s == 150.0


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
    files.loading_s = loading_deadline_s(configs.load(section))
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
    assert 0.04 <= beat["waited_s"]["hidden states"] < 2 and 0.02 <= beat["waited_s"]["room 0"] < 2
    assert beat["peak_gib"] == {"cuda:0": 1.25}


def test_a_main_thread_that_hangs_goes_stale(tmp_path: Path) -> None:
    """Other threads must not keep the heartbeat fresh."""
    files = RunFiles(tmp_path)
    files.enter("training")
    first = read(tmp_path / "heartbeat.json")["mono"]
    helper = threading.Thread(target=time.sleep, args=(1.3,))
    helper.start()
    helper.join(10)
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


def program(folder: Path, body: str) -> list[str]:
    head = (
        "import sys, time, threading\nfrom pathlib import Path\nfrom trainer.run.runfiles import RunFiles\n"
        f"files = RunFiles(Path({str(folder)!r}))\nfiles.listen()\n"
    )
    return [sys.executable, "-c", head + body]


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
        (f"sys.exit(guarded(lambda: fail({OOM!r}), files))\n", 1, "RuntimeError"),
        (f"sys.exit(guarded(lambda: fail({OOM!r}, DataError), files))\n", 1, "DataError"),
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
    assert ("Traceback" in done.stderr) == (error == "RuntimeError")
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


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_is_raised_at_the_next_beat(tmp_path: Path, number: signal.Signals, code: int) -> None:
    body = (
        "from trainer.errors import Stopped\nprint('ready', flush=True)\n"
        "try:\n    while True:\n        files.beat(); time.sleep(0.01)\n"
        "except Stopped as stop:\n    print(stop, flush=True); sys.exit(stop.exit_code)\n"
    )
    with subprocess.Popen(program(tmp_path, body), cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(30) == code
        assert process.stdout.read() == f"stopped by {number.name}\n"


def test_under_nohup_a_closed_terminal_stops_nothing(tmp_path: Path) -> None:
    body = (
        "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nfiles.beat()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "try:\n    files.beat()\nexcept Exception as stop:\n    print(stop)\n"
    )
    command = ["nohup", *program(tmp_path, body)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "stopped by SIGTERM\n"


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_output_that_nobody_reads_any_more_ends_nothing(kind: str, tmp_path: Path) -> None:
    body = (
        "from trainer.writing import lose_lines_that_cannot_be_told\nlose_lines_that_cannot_be_told()\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
        "for step in range(100):\n    print('lost', flush=True); print('lost', file=sys.stderr)\n"
        "files.note('all printed')\n"
    )
    ours, theirs = os.openpty() if kind == "terminal" else os.pipe()
    with subprocess.Popen(
        program(tmp_path, body), cwd=PROJECT, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        assert os.read(ours, 5) == b"ready"
        os.close(ours)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    assert lines(tmp_path / "events.jsonl")[-1]["text"] == "all printed"


HANG_IN_C = (  # a mutex that its own thread has locked: the interpreter runs nothing in the main thread
    "import ctypes\nlock = ctypes.create_string_buffer(256)\nprint('ready', flush=True)\n"
    "for _ in range(2):\n    ctypes.CDLL(None).pthread_mutex_lock(lock)\n"
)
HANG_IN_PYTHON = "print('ready', flush=True)\nwhile True:\n    time.sleep(0.2)\n"


@pytest.mark.parametrize("body", [HANG_IN_PYTHON, HANG_IN_C])
def test_a_second_signal_two_seconds_later_does_not_wait(tmp_path: Path, body: str) -> None:
    """The main thread hangs and never beats: the first SIGTERM waits for it, so do its echoes."""
    with subprocess.Popen(
        program(tmp_path, body), cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        first = time.monotonic()
        while process.poll() is None:
            assert time.monotonic() - first < 60
            process.terminate()
            time.sleep(0.25)
        assert time.monotonic() - first >= 2.0
        assert process.returncode == 143
        assert (
            process.stderr is not None and "a second SIGTERM: ended without waiting" in process.stderr.read()
        )


def test_a_stop_is_raised_once(tmp_path: Path) -> None:
    """Saving goes on after it; a later signal kills (above), it does not raise again."""
    body = (
        "import os, signal\nfrom trainer.errors import Stopped\n"
        "for number in range(2):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    try:\n        files.beat(); print('beat')\n    except Stopped as stop:\n        print(stop)\n"
    )
    done = subprocess.run(program(tmp_path, body), cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "stopped by SIGTERM\nbeat\n"


def test_a_full_disk_is_said_and_ends_nothing(tmp_path: Path) -> None:
    body = (
        "import resource\nfiles.enter('training')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))\n"
        "for step in range(1, 4):\n    files.stepped(step); files.record({'loss': 1.0})\n"
        "    files.beat(force=True)\n"
        "print('alive')\n"
    )
    done = subprocess.run(program(tmp_path, body), cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "alive\n"
    assert done.stderr.count("cannot be written: File too large; the run goes on without") == 1
    assert read(tmp_path / "heartbeat.json")["step"] is None  # the last that could be written, whole
    assert not list(tmp_path.glob("*.tmp"))


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


def test_a_line_that_a_full_disk_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    files.record({"loss": 2.0})
    files.record({"loss": 1.0})
    first, *lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert first == '{"step": 1, "lo' and [json.loads(line)["loss"] for line in lines] == [2.0, 1.0]


def on_full_disk(folder: Path, body: str) -> tuple[int, Path]:
    """A program's exit code, and where the files of its run and its `log` are; `full()` fills the disk."""
    begin = (
        f"from pathlib import Path\ndisk = Path({str(folder)!r})\n"
        "def full():\n"
        "    with open(disk / 'filler', 'wb', buffering=0) as file:\n"
        "        for size in (4096, 1):\n"
        "            try:\n                while True: file.write(b'x' * size)\n"
        "            except OSError: pass\n"
        "from trainer.writing import lose_lines_that_cannot_be_told\n"
        "print('before', flush=True)\nlose_lines_that_cannot_be_told()\nprint('then', flush=True)\n"
    )
    begun = program(folder / "run", "")[-1]
    command = on_small_disk(folder, "1m", [sys.executable, "-c", begin + begun + body])
    done = subprocess.run(command, cwd=PROJECT, timeout=60)
    return done.returncode, folder.with_name(f"{folder.name}.after")


def test_a_root_cause_has_its_place_on_a_full_disk(tmp_path: Path) -> None:
    body = (
        "full()\nfiles.record({'loss': 1.0})\n"
        "try:\n    raise MemoryError('x' * 5000)\nexcept MemoryError as error:\n    files.fail(error)\n"
    )
    code, disk = on_full_disk(tmp_path / "disk", body)
    assert code == 0
    assert read(disk / "run/root_cause.json")["error"] == f"MemoryError: {'x' * 5000}"
    assert not (disk / "run/metrics.jsonl").exists() or (disk / "run/metrics.jsonl").read_text() == ""


def test_a_log_on_a_full_disk_loses_lines_and_ends_nothing(tmp_path: Path) -> None:
    body = (
        "full()\n"
        "for _ in range(10_000): print('lost', flush=True); print('lost', file=sys.stderr)\n"
        "(disk / 'filler').unlink()\nprint('after', flush=True)\n"
        "full()\ndef fails(): raise KeyError('in a thread')\n"
        "import threading, time\nthreading.Thread(target=fails).start()\ntime.sleep(60)\n"
    )
    code, disk = on_full_disk(tmp_path / "disk", body)
    assert code == 70  # how a thread's failure ends a run
    text = (disk / "log").read_text()
    assert text.startswith("before\nthen\n") and "after\n" in text and text.count("lost") < 10_000
    assert read(disk / "run/root_cause.json")["error"] == "KeyError: 'in a thread'"


def test_a_full_disk_anywhere_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/disk/parameters.json")

    assert guarded(fails, RunFiles(tmp_path)) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "error: /disk/parameters.json: cannot write: No space left on device\nnext: make room"
    )
    assert "known failure disk-full" in said and "Traceback" not in said
    assert "in fails" in read(tmp_path / "root_cause.json")["traceback"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "error: {}: cannot be used: Permission denied\nnext: see whose it is"),
        (errno.EROFS, "error: {}: cannot be used: Read-only file system\nnext: see whose it is"),
        (errno.ENOTDIR, "error: {}: cannot be used: Not a directory\nnext: see whose it is"),
        (errno.ENOENT, "Traceback"),  # may be a file of ours that a bug lost
    ],
)
def test_a_place_that_cannot_be_used_is_one_message(
    number: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    def fails() -> None:
        raise OSError(number, os.strerror(number), "runs")

    assert guarded(fails, RunFiles(tmp_path)) == 1
    assert capsys.readouterr().err.startswith(said.format(tmp_path / "runs"))
    assert "in fails" in read(tmp_path / "root_cause.json")["traceback"]
