"""A run's files on a disk that is full, or cannot be written.

Run: python -m pytest tests/trainer/test_run_full_disk.py
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_programs import PROJECT, program, read
from small_disk import on_small_disk

from trainer.guard import guarded
from trainer.process.runfiles import RunFiles


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

    assert guarded(fails, RunFiles(tmp_path).fail) == 1
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

    assert guarded(fails, RunFiles(tmp_path).fail) == 1
    assert capsys.readouterr().err.startswith(said.format(tmp_path / "runs"))
    assert "in fails" in read(tmp_path / "root_cause.json")["traceback"]
