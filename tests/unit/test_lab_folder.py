"""The lab removes its own files only, whatever they have become."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from dflashctl.errors import Locked, UsageError
from dflashctl.lab import folder
from dflashctl.lab.state import LabPaths


@pytest.fixture
def paths(tmp_path: Path) -> LabPaths:
    return LabPaths(tmp_path / "lab")


def fill(paths: LabPaths) -> None:
    for place in (paths.ssh, paths.host_root, paths.pct, paths.gpu, paths.bin, paths.etc, paths.workspace):
        place.mkdir(parents=True, exist_ok=True)
        (place / "file").write_text("x")
    (paths.disk(200) / "root").mkdir(parents=True)
    paths.record.write_text("{}")
    paths.log.write_text("log")


def test_a_new_folder_is_private_and_marked(paths: LabPaths) -> None:
    with folder.locked(paths, create=True) as there:
        assert there and paths.lock.exists()
    assert paths.root.stat().st_mode & 0o7777 == 0o700


def test_without_a_lab_nothing_is_made(paths: LabPaths) -> None:
    with folder.locked(paths, create=False) as there:
        assert not there
    assert not paths.root.exists()
    paths.root.mkdir()
    with folder.locked(paths, create=False) as there:
        assert not there
    assert list(paths.root.iterdir()) == []


@pytest.mark.parametrize("create", [True, False])
def test_a_folder_with_other_files_is_left_alone(paths: LabPaths, create: bool) -> None:
    paths.root.mkdir(mode=0o755)
    (paths.root / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not a lab's") as caught, folder.locked(paths, create=create):
        pytest.fail("not reached")
    assert str(paths.root) == caught.value.where
    assert [p.name for p in paths.root.iterdir()] == ["thesis.txt"]
    assert paths.root.stat().st_mode & 0o7777 == 0o755


def test_a_file_in_place_of_the_folder_is_said(paths: LabPaths) -> None:
    paths.root.write_text("")
    with pytest.raises(UsageError, match="cannot write the lab's files"), folder.locked(paths, create=True):
        pytest.fail("not reached")


def test_a_copy_that_fails_is_told_by_the_place_it_was_to_go_to(paths: LabPaths) -> None:
    """Not by the file of ours that was read."""
    full = OSError(errno.ENOSPC, "No space left on device", "/venv/nvidia-smi.sh", None, f"{paths.root}/smi")
    assert folder.trouble(paths, full).where == f"{paths.root}/smi"


def test_cleaning_keeps_disks_and_log(paths: LabPaths) -> None:
    with folder.locked(paths, create=True):
        fill(paths)
        assert folder.clean(paths)
        assert not folder.clean(paths)
    left = {str(p.relative_to(paths.root)) for p in paths.root.rglob("*")}
    assert left == {"lab.lock", "host.log", "node", "node/disk", "node/disk/200", "node/disk/200/root",
                    "node/workspace", "node/workspace/file"}  # fmt: skip


def test_removing_leaves_nothing(paths: LabPaths) -> None:
    with folder.locked(paths, create=True):
        fill(paths)
        folder.remove(paths)
    assert not paths.root.exists()


def test_removing_spares_a_strangers_file(paths: LabPaths) -> None:
    with folder.locked(paths, create=True):
        fill(paths)
        (paths.root / "notes.txt").write_text("mine")
        folder.remove(paths)
    assert [p.name for p in paths.root.iterdir()] == ["notes.txt"]


def test_trees_without_permissions_go_too(tmp_path: Path) -> None:
    """What a program in the container may leave; root is not stopped by modes, an ordinary user is."""
    tree = tmp_path / "tree"
    inner = tree / "a/b/c"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (tree / "a/link").symlink_to("/etc/hostname")
    (tree / "loop").symlink_to(".")
    for place in (inner, inner.parent, inner.parent.parent, tree):
        place.chmod(0)
    folder.remove_tree(tree)
    assert not os.path.lexists(tree)
    folder.remove_tree(tree)  # gone already: fine


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("x")
    (tmp_path / "ssh").symlink_to("precious")
    folder.remove_tree(tmp_path / "ssh")
    assert (tmp_path / "precious/file").read_text() == "x"
    assert not os.path.lexists(tmp_path / "ssh")


def _hold(root: str, ready: Event, asked: Event, seconds: float) -> None:
    with folder.locked(LabPaths(Path(root)), create=True):
        ready.set()
        asked.wait(60)
        time.sleep(seconds)


def _remove(root: str, ready: Event, asked: Event, seconds: float) -> None:
    paths = LabPaths(Path(root))
    with folder.locked(paths, create=True):
        ready.set()
        asked.wait(60)
        time.sleep(seconds)
        folder.remove(paths)


@pytest.mark.parametrize("work", [_hold, _remove])
def test_a_second_one_waits_even_if_the_folder_goes_meanwhile(paths: LabPaths, work: object) -> None:
    context = multiprocessing.get_context("spawn")
    ready, asked = context.Event(), context.Event()
    other = context.Process(target=work, args=(str(paths.root), ready, asked, 0.4))
    other.start()
    try:
        assert ready.wait(60)
        began = time.monotonic()
        asked.set()
        with folder.locked(paths, create=True) as there:
            assert there and paths.lock.exists()
            assert time.monotonic() - began > 0.3
    finally:
        other.join(30)
    assert other.exitcode == 0


def test_waiting_ends_with_a_message(paths: LabPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LOCK_DEADLINE_S", 0.2)
    context = multiprocessing.get_context("spawn")
    ready, asked = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(paths.root), ready, asked, 0.0))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(Locked, match="at work"), folder.locked(paths, create=True):
            pytest.fail("not reached")
    finally:
        asked.set()
        other.join(60)


def test_a_grown_log_begins_afresh(paths: LabPaths) -> None:
    paths.root.mkdir()
    folder.trim_log(paths)
    paths.log.write_bytes(b"x")
    folder.trim_log(paths)
    assert paths.log.exists()
    paths.log.write_bytes(b"x" * (folder.LOG_LIMIT_BYTES + 1))
    folder.trim_log(paths)
    assert not paths.log.exists()
