"""How `python -m trainer` ends: with all that Python does at the end but taking itself apart.

Run: python -m pytest tests/trainer/test_process_end.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
AT_THE_END = """
import atexit, os, sys, threading, time

class Kept:
    def __del__(self, write=os.write):
        write(2, b"taken apart\\n")

sys.kept = Kept()

def late():
    time.sleep(0.3)
    print("a thread ended", file=sys.stderr)
    atexit.register(os.write, 2, b"was registered\\n")

threading.Timer(0.0, late).start()
"""


def trainer(
    words: list[str], place: Path, stdout: object = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    (place / "sitecustomize.py").write_text(AT_THE_END)
    return subprocess.run(
        [sys.executable, "-m", "trainer", *words],
        env={**os.environ, "PYTHONPATH": f"{place}:{PROJECT}"},
        stdout=stdout,  # type: ignore[call-overload]
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), (["train", "/nowhere.yaml"], 2), (["--nonsense"], 2)]
)
def test_threads_and_what_was_registered_come_first(words: list[str], code: int, tmp_path: Path) -> None:
    done = trainer(words, tmp_path)
    assert done.returncode == code, done.stderr
    told = [line for line in done.stderr.splitlines() if line in ("a thread ended", "was registered")]
    assert told == ["a thread ended", "was registered"]
    assert "taken apart" not in done.stderr
    assert code or "Train DFlash drafters" in done.stdout


def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{PROJECT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_what_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        assert trainer(["--help"], tmp_path, full).returncode != 0
