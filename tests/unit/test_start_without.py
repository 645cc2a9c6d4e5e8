"""Run with: pytest tests/unit/test_start_without.py. An interpreter without the packages, or too old."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl import start

PROJECT = Path(__file__).parents[2]


def test_without_its_packages_it_says_so_in_two_lines() -> None:
    # -S: no site-packages, as in another virtual environment.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "dflashctl", "status"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {sys.executable} has no ")
    assert second.startswith("next: start the dflashctl of the environment that it is installed in")


def test_a_module_of_its_own_that_is_gone_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dflashctl.cli.main", None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with pytest.raises(ModuleNotFoundError, match=r"dflashctl\.cli\.main"):
        start.main()


def test_an_older_python_can_read_the_lines_that_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__main__.py", "start.py"):
        ast.parse((PROJECT / "dflashctl" / name).read_text(), feature_version=(3, 8))
    said: list[str] = []
    monkeypatch.setattr(start, "_refuse", said.append)
    monkeypatch.setattr(start, "OLDEST", (9, 99))
    monkeypatch.setattr(start, "listen", lambda: sys.exit(0))
    with pytest.raises(SystemExit):
        start.main()
    assert said == [f"is Python {sys.version_info[0]}.{sys.version_info[1]}; dflashctl needs 9.99 or newer"]
