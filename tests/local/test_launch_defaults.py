"""Run with: pytest tests/local/test_launch_defaults.py. A first run on a host that is only named."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflashctl.cli.main import run
from dflashctl.errors import ExitCode

RECIPE = "version: 1\nname: r\nlaunch: {command: [sh, -c, 'echo done > here'], gpus: {count: 0}}\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(tmp_path / "hosts.yaml"))
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def launched(place: Path, host: str) -> int:
    (place / "hosts.yaml").write_text(f"version: 1\nhosts: {{me: {{{host}}}}}\n")
    return run(["launch", "-r", str(place / "r.yaml"), "--tag", "first", "--wait"])


def test_a_local_host_that_is_only_named_runs_at_once(place: Path) -> None:
    assert launched(place, "engine: local") == ExitCode.OK
    assert (place / "xdg-state/dflashctl/local/me/work/here").read_text() == "done\n"


def test_a_workdir_that_a_person_named_is_not_made(place: Path) -> None:
    """It may be the mount point of a disk that is not there."""
    assert launched(place, f"engine: local, workdir: {place}/disk") == ExitCode.NOT_FOUND
    assert not (place / "disk").exists()
