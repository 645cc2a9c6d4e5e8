"""Locks, listeners that go away, full disks, deadlines and kills in the middle of an install.

Run: python -m pytest tests/unit/test_install_faults.py
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.main import DeadlinePassed
from dflashctl.agent.records import runfolder
from dflashctl.agent.releases import ground, install, release
from dflashctl.agent.releases import tree as agent_tree
from dflashctl.agent.releases.deploylock import DeployLock

sys.path.insert(0, str(Path(__file__).parent))

from install_box import Box, Emit, refused, unharmed


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.fixture
def running(box: Box) -> tuple[Box, str]:
    """A box with a current release; a failing deploy must leave exactly this."""
    return box, box.deploy()["release"]


# --- locks, listeners, disks --------------------------------------------------------------------------------


def test_one_deploy_at_a_time_and_the_holder_is_named(running: tuple[Box, str]) -> None:
    box, name = running
    box.write("prog/a.py", "w = 1\n")
    with DeployLock(str(box.code_root), "ben@desk", "warm 12345678"):
        assert box.facts(box.snapshot())["lock"]["who"] == "ben@desk"
        with refused("locked") as caught:
            box.deploy()
    assert "ben@desk (warm 12345678) is deploying here since " in caught[0].what
    unharmed(box, name)
    assert box.facts(box.snapshot())["lock"] is None
    assert box.deploy()["switched"]


def test_a_deploy_can_wait_for_the_lock(box: Box) -> None:
    code = (
        "import sys, time; from dflashctl.agent.releases.deploylock import DeployLock\n"
        "with DeployLock(sys.argv[1], 'ben@desk', 'x'):\n    print('held', flush=True); time.sleep(1)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(box.code_root)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert box.deploy(wait_s=20)["switched"]
    finally:
        other.kill()
        other.communicate()


def test_the_lock_of_a_killed_holder_is_free(box: Box) -> None:
    code = (
        "import sys, time; from dflashctl.agent.releases.deploylock import DeployLock\n"
        "with DeployLock(sys.argv[1], 'ben@desk', 'x'):\n    print('held', flush=True); time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(box.code_root)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    other.kill()
    other.communicate()
    assert box.deploy()["switched"]


def test_when_nobody_listens_any_more_nothing_switches(running: tuple[Box, str]) -> None:
    box, name = running
    box.write("prog/a.py", "v = 1\n")
    with refused("unreachable"):
        install.install_release(box.request(box.snapshot()), Emit(gone=True))
    unharmed(box, name)


def test_current_that_is_no_link_is_not_ours(box: Box) -> None:
    (box.code_root / "current").mkdir()
    with refused() as caught:
        box.deploy()
    assert "is not a symbolic link" in caught[0].what
    assert box.releases() == []


@pytest.mark.parametrize("step", ["write", "manifest", "history", "switch"])
def test_a_full_disk_at_any_step_leaves_the_old_release(
    running: tuple[Box, str], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, name = running
    box.write("prog/a.py", "u = 1\n")
    request = box.request(box.snapshot())

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    if step == "write":
        monkeypatch.setattr(agent_tree, "_write", full)
    elif step == "manifest":
        monkeypatch.setattr(runfolder, "write_json", full)
    elif step == "history":
        monkeypatch.setattr(release, "append_history", full)
    else:
        monkeypatch.setattr(os, "symlink", full)
    with refused() as caught:
        install.install_release(request, Emit())
    assert caught[0].what == "No space left on device (somewhere); nothing switched"
    assert "free some space" in caught[0].next
    assert box.current() == name
    assert box.litter() == []


def test_a_deadline_in_the_middle_leaves_nothing(
    running: tuple[Box, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    box, name = running
    box.write("prog/a.py", "s = 1\n")
    request = box.request(box.snapshot())

    def late(*args: Any) -> Any:
        raise DeadlinePassed

    monkeypatch.setattr(install.proofs, "compile_tree", late)
    with pytest.raises(DeadlinePassed):
        install.install_release(request, Emit())
    unharmed(box, name)


@pytest.mark.parametrize("moment", ["unpacking", "verifying", "proving", "switching"])
def test_killed_outright_at_any_step_the_old_release_stays_and_the_next_deploy_sweeps(
    running: tuple[Box, str], moment: str
) -> None:
    box, name = running
    box.write("prog/a.py", "r = 1\n")
    request = box.request(box.snapshot())
    code = (
        "import json, os, signal, sys; from dflashctl.agent.releases import install\n"
        "request = json.load(sys.stdin)\n"
        "def emit(event):\n"
        "    if event['phase'] == sys.argv[1]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "install.install_release(request, emit)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, moment], input=json.dumps(request).encode())
    assert done.returncode == -9
    assert box.current() == name
    box.archive(request["id"]).unlink(missing_ok=True)
    assert box.deploy()["switched"]
    assert box.litter() == []


# --- facts --------------------------------------------------------------------------------------------------


def test_facts_of_an_empty_place_change_nothing_without_prepare(box: Box) -> None:
    box.code_root.rmdir()
    facts = box.facts(box.snapshot(), prepare=False)
    assert (facts["current"], facts["releases"], facts["have"]) == (None, [], [])
    assert facts["free_bytes"] > 0
    assert facts["python"] == sys.executable
    assert not box.code_root.exists()
    box.facts(box.snapshot(), prepare=True)
    assert box.code_root.is_dir()


def test_facts_name_a_broken_manifest_and_go_on(box: Box) -> None:
    first = box.deploy()["release"]
    box.write("prog/a.py", "q = 1\n")
    second = box.deploy()["release"]
    (box.code_root / "releases" / first / release.MANIFEST).write_text("{")
    rows = {row["release"]: row for row in box.facts(box.snapshot())["releases"]}
    assert "problem" in rows[first]
    assert rows[second]["deployed_by"] == "anna@laptop"


def test_a_place_where_nobody_can_write_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with refused() as caught:
        ground.ready(str(tmp_path / "file" / "code"), create=False)
    assert caught[0].what == "is a file, but a folder is needed here"
    monkeypatch.setattr(os, "access", lambda *args: False)
    with refused() as caught:
        ground.ready(str(tmp_path), create=False)
    assert "Permission denied; nothing switched" in caught[0].what
    tmp_path.chmod(0o500)
    with refused() as caught:
        ground.ready(str(tmp_path), create=False)
    assert caught[0].next == "it is ours, with mode 0500: chmod u+rwx it, or choose another code_root"
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with refused() as caught:
        ground.ready(str(tmp_path), create=False)
    assert f"belongs to uid {tmp_path.stat().st_uid} and this is uid 12345: chown it" in caught[0].next
    monkeypatch.setattr(ground, "NOBODY", tmp_path.stat().st_uid)
    with refused() as caught:
        ground.ready(str(tmp_path), create=False)
    assert "chown the folder behind it to 100000:100000" in caught[0].next
