"""Deploys beside other people's, with a wrong clock, and to a machine without a container.

After each: the old release still runs, no half state, no lock, no staging is left, and the message says what
to do. Run: python -m pytest tests/bed/test_deploy_others.py
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from bedkit.bed import Bed
from bedkit.project import Project
from deploy_faults import LOCKED, Case, host_script, staged
from unproven import did_not_run

pytestmark = pytest.mark.bed


@pytest.fixture
def case(bed: Bed, tmp_path: Path) -> Case:
    return Case(bed, tmp_path / "project")


# --- clocks, and other people -------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", ["+3h", pytest.param("-3h", marks=pytest.mark.soak)])
def test_a_laptop_clock_that_is_three_hours_off(case: Case, offset: str) -> None:
    case.change()
    library = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
    if not Path(library).exists():
        did_not_run("a laptop whose clock is off. apt install libfaketime")
    off = {"LD_PRELOAD": library, "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    shown = case.project.run("deploy", timeout=90, **off)
    assert shown.returncode == 0, shown.stderr
    rows = json.loads(case.project.ok("releases", "--json", **off).stdout)["releases"]
    assert all(0 <= row["age_s"] < 600 for row in rows), "ages are told by the container's clock"
    assert case.litter() == []
    case.before = case.current()
    case.change()
    case.unharmed()


def test_two_deploys_at_once(case: Case, tmp_path: Path) -> None:
    """One waits; nothing mixes."""
    case.change(noise=3_000_000)
    argv = case.project.argv("deploy", "--wait", "60", "--json")
    both = [
        subprocess.Popen(
            argv,
            cwd=case.project.folder,
            env=case.project.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    switched = sorted(json.loads(out)["proof"]["switched"] for out, _ in answers)
    assert switched == [False, True], "the one that waited found the release there"
    assert case.litter() == [] and case.wrong() == []


def test_without_wait_the_second_is_told_who_deploys(case: Case) -> None:
    case.change(noise=3_000_000)
    go = case.bed.layout.shared / "go"
    slow = f'case $1 in push) until [ -e {go} ]; do sleep 0.1; done;; esac\nexec $REAL "$@"'
    with host_script(case.bed, "pct", slow):
        first = subprocess.Popen(
            case.project.argv("deploy"),
            cwd=case.project.folder,
            env=case.project.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        end = time.monotonic() + 90
        while not staged(case):
            assert time.monotonic() < end
            time.sleep(0.02)
        said = case.refused(LOCKED)
        assert "(steady " in said and "is deploying here since" in said and "dflashctl lock show" in said
        go.touch()
        first.communicate(timeout=90)
    assert first.returncode == 0
    assert case.litter() == []


# --- a machine without a container --------------------------------------------------------------------------


def test_a_bare_machine_over_ssh_has_the_same_lock_and_leaves_nothing(bed: Bed, tmp_path: Path) -> None:
    """Engine `ssh`: the archive goes straight to its place; the lock is the machine's."""
    entry = bed.host_entry()
    home = str(bed.layout.home)
    bare = {key: entry[key] for key in ("ssh", "python", "gpus")}
    paths = {"code_root": f"{home}/code", "workdir": home, "log_dir": home, "state_dir": f"{home}/state"}
    project = Project(tmp_path / "bare", {"bed": {"engine": "ssh", **bare, **paths}})
    project.write_recipe("steady")
    first = project.json("deploy")
    again = project.json("deploy")
    assert first["proof"]["switched"] and (again["sent_files"], again["proof"]["switched"]) == (0, False)
    left = bed.on_host(["ls", "-A", f"{home}/code"]).stdout.decode().split()
    assert sorted(left) == [".lock", "current", "history.jsonl", "releases"]
    assert "nobody is deploying" in project.ok("lock", "show").stdout
