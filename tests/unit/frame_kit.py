"""The real program, and verbs made up for a test (`verb`) with a log of errors of their own (`log`)."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a bug's traceback goes."""
    path = tmp_path / "logs" / "errors.log"
    monkeypatch.setenv("DFLASHCTL_LOG", str(path))
    return path


@pytest.fixture
def verb(log: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Make `dflashctl status` be the given function."""

    def install(function: Callable[..., Any]) -> None:
        module = types.ModuleType("dflashctl.cli.status")
        module.app = typer.Typer()  # type: ignore[attr-defined]
        module.app.command()(function)
        monkeypatch.setitem(sys.modules, "dflashctl.cli.status", module)

    return install


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real program."""
    return subprocess.run(
        [sys.executable, "-m", "dflashctl", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **{"cwd": ROOT, **options},
    )
