"""Deploys that meet full disks, other people and second thoughts: the old release runs on, nothing is left.

Run: python -m pytest tests/lab/test_deploy_faults.py
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy_project import RECIPE, Project, until

from dflashctl.errors import DflashError, VerificationFailed
from dflashctl.lab.state import LabPaths, Record
from dflashctl.releases.desk import Desk
from dflashctl.remote.factory import open_engine

pytestmark = pytest.mark.lab


@pytest.fixture
def project(lab: Record, lab_paths: LabPaths, tmp_path: Path) -> Project:
    return Project(tmp_path / "project", lab.endpoint, lab_paths)


# --- disks and pushes that fail -----------------------------------------------------------------------------


@contextlib.contextmanager
def meddling(**acts: Callable[[], object]) -> Iterator[None]:
    """Something happens `before` or `after` an archive is delivered."""
    real = Desk.deliver

    def deliver(*args: Any, **more: Any) -> str:
        acts.get("before", lambda: None)()
        said = real(*args, **more)
        acts.get("after", lambda: None)()
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Desk, "deliver", deliver)
        yield


@pytest.fixture
def small_disk(project: Project) -> Iterator[Project]:
    """The code root on a file system of 12 MiB, with a release on it and a change of 1 MiB to come."""
    code = f"{project.inside}/code"
    project.shell(f"mkdir -p {code} && mount -t tmpfs -o size=12m lab {code}")
    project.deploy()
    project.write("prog/noise.txt", secrets.token_hex(1 << 19))
    yield project
    project.shell(f"umount {code}")


def fill(project: Project, leave_kib: int) -> None:
    project.shell(
        f"cd {project.inside}/code && head -c 12m /dev/zero > filler 2>/dev/null;"
        f" truncate -s -{leave_kib}K filler; true"
    )


def unfill(project: Project) -> None:
    project.shell(f"rm -f {project.inside}/code/filler")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_disk_that_fills_up_on_the_way(small_disk: Project, moment: str) -> None:
    """Before the push: `pct push` truncates the archive and exits 0. After it: the unpacking meets ENOSPC."""
    project = small_disk
    before = project.current()
    with (
        meddling(**{moment: lambda: fill(project, leave_kib=64)}),
        pytest.raises(DflashError) as caught,
    ):
        project.deploy()
    assert caught.value.exit_code == 4
    assert "No space left on device" in caught.value.what or "the archive arrived with" in caught.value.what
    unfill(project)
    assert project.current() == before
    assert project.litter() == []
    assert project.deploy().proof["switched"]


def test_a_full_disk_is_said_before_anything_travels(small_disk: Project) -> None:
    project = small_disk
    fill(project, leave_kib=64)

    def never() -> None:
        raise AssertionError("something travelled")

    with (
        meddling(before=never),
        pytest.raises(VerificationFailed, match="not enough space"),
    ):
        project.deploy()
    unfill(project)


def test_a_read_only_file_system_is_explained(small_disk: Project) -> None:
    project = small_disk
    project.shell(f"mount -o remount,bind,ro {project.inside}/code")
    done = project.cli()
    project.shell(f"mount -o remount,bind,rw {project.inside}/code")
    assert done.returncode == 4, done.stderr
    assert "Read-only file system; nothing switched" in done.stderr
    assert "mount it writable" in done.stderr


# --- two people, and one who changes his mind ---------------------------------------------------------------


def test_two_deploys_at_once_do_not_mix(project: Project, tmp_path: Path) -> None:
    project.deploy()
    results: dict[str, object] = {}

    def one(name: str) -> None:
        folder = tmp_path / name
        mine = Project.__new__(Project)
        mine.__dict__.update(project.__dict__)
        mine.root = folder
        mine.write("recipes/warm.yaml", RECIPE)
        mine.write("prog/__init__.py", f"who = {name!r}\n")
        mine.write("prog/policy.py", f"cudagraph_trees = False  # {name}\n")
        try:
            results[name] = mine.deploy(wait_s=30).proof["release"]
        except Exception as error:  # shown by the assertion below, whatever it is
            results[name] = error

    threads = [threading.Thread(target=one, args=(name,)) for name in ("anna", "ben")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(result) for result in results.values()] == [str, str], results
    last = project.current()
    assert last in results.values()
    winner = next(name for name, release in results.items() if release == last)
    there = project.seen / "code" / "current" / "prog"
    assert winner in (there / "__init__.py").read_text()
    assert winner in (there / "policy.py").read_text()
    assert project.litter() == []


def test_a_holder_of_the_lock_is_named(project: Project) -> None:
    project.deploy()
    with open_engine(project.host) as engine, Desk(engine, "warm 1234"):
        done = project.cli()
        assert done.returncode == 8, done.stderr
        assert "(warm 1234) is deploying here since" in done.stderr
        waiting = subprocess.Popen(
            project.argv("--wait", "60"), cwd=project.root, env=project.env(), stdout=subprocess.DEVNULL
        )
        time.sleep(1.5)
        assert waiting.poll() is None
    assert waiting.wait(60) == 0


@pytest.mark.parametrize("after_s", [0.3, 0.5, 0.7, 0.9, 1.1])
def test_ctrl_c_at_any_moment_leaves_one_whole_release(project: Project, after_s: float) -> None:
    before = project.deploy().proof["release"]
    for number in range(100):
        project.write(f"prog/f{number}.txt", secrets.token_hex(20_000))
    new = project.source().snapshot.release
    process = subprocess.Popen(
        project.argv(), cwd=project.root, env=project.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    # -2: Python ends itself by SIGINT when the interrupt fell into an exec() of an import; a shell shows 130.
    assert process.returncode in (0, 130, -signal.SIGINT), said.decode()
    assert b"Traceback" not in said
    until(lambda: project.litter() == [])
    assert project.current() in (before, new)
    if process.returncode == 0:
        assert project.current() == new
    assert project.deploy().proof["release"] == project.current() == new
