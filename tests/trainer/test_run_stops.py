"""How a run ends when it is told to, or when nobody reads it any more.

Run: python -m pytest tests/trainer/test_run_stops.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from run_programs import PROJECT, lines, program


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
