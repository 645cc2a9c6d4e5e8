"""A lab of a test's own, and looks at its processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab_client import cli_argv, cli_environment

from dflashctl.agent.processes import proc
from dflashctl.lab import lifecycle
from dflashctl.lab.state import LabPaths, Record


def processes_of(paths: LabPaths) -> list[int]:
    """Every process of this lab: it writes to the lab's log, or has the lab's folders mounted."""
    found = []
    for pid in proc.table():
        try:
            log = str(Path(f"/proc/{pid}/fd/2").readlink())
        except OSError:
            log = ""
        try:
            mounts = Path(f"/proc/{pid}/mountinfo").read_text(errors="replace")
        except OSError:
            mounts = ""
        if log == str(paths.log) or f"{paths.node} " in mounts or f"{paths.node}/" in mounts:
            found.append(pid)
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def child_of_host(record: Record, name: str) -> int:
    """One that the host has just forked takes its name a moment later."""

    def children() -> list[int]:
        return [p.pid for p in proc.table().values() if p.ppid == record.pid and p.comm == name]

    wait_for(children)
    (child,) = children()
    return child


# --- several at once --------------------------------------------------------------------------------------


def start_cli(paths: LabPaths, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        cli_argv(*words),
        env=cli_environment(paths.root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LabPaths]:
    """A place for a lab of the test's own; whatever is up there at the end is ended."""
    paths = LabPaths(tmp_path / "own")
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", str(paths.root))
    yield paths
    if paths.lock.exists():
        lifecycle.down()
    assert processes_of(paths) == []
