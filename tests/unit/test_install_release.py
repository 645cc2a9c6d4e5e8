"""A release that is installed: proven, named, current; what is reused, kept, pruned.

Run: python -m pytest tests/unit/test_install_release.py
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.releases import install, release
from dflashctl.agent.releases import tree as agent_tree

sys.path.insert(0, str(Path(__file__).parent))

from install_box import PROGRAM, Box, Emit, refused, write_archive


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


# --- the good way -------------------------------------------------------------------------------------------


def test_a_first_deploy_is_proven_named_and_current(box: Box) -> None:
    snapshot = box.snapshot()
    emit = Emit()
    expect = [{"file": "prog/a.py", "text": "graphs = False", "regex": None, "present": True}]
    done = install.install_release(box.request(snapshot, expect=expect), emit)
    assert (done["release"], done["before"], done["switched"], done["reused"]) == (
        snapshot.release,
        None,
        True,
        False,
    )
    assert (done["verified"], done["compiled"], done["python"]) == (5, 2, sys.executable)
    assert done["expect"][0]["line"] == 2
    final = box.code_root / "releases" / snapshot.release
    assert done["imports"] == str(final / "prog" / "__init__.py")
    assert [event["phase"] for event in emit.events] == [
        "unpacking",
        "verifying",
        "compiling",
        "proving",
        "switching",
    ]
    assert (box.code_root / "current" / "prog" / "a.py").read_text() == PROGRAM["prog/a.py"]
    assert box.current() == snapshot.release
    assert box.litter() == []
    assert release.differences(str(final), snapshot.manifest()) == []  # type: ignore[arg-type]


def test_modes_are_the_manifests_whatever_the_umask(box: Box) -> None:
    mask = os.umask(0o077)
    try:
        box.deploy()
    finally:
        assert os.umask(mask) == 0o077, "the umask of the process must be as before"
    modes = {
        path.relative_to(box.code_root / "current").as_posix(): oct(path.stat().st_mode & 0o777)
        for path in (box.code_root / "current").rglob("*")
    }
    assert modes["run.sh"] == modes["prog"] == "0o755"
    assert modes["prog/a.py"] == "0o644"


def test_the_release_says_what_it_is(box: Box) -> None:
    name = box.deploy()["release"]
    body = json.loads((box.code_root / "releases" / name / release.MANIFEST).read_text())
    assert (body["version"], body["release"], body["deployed_by"], body["recipe"]) == (
        1,
        name,
        "anna@laptop",
        "warm",
    )
    assert body["git"] == {"commit": "1c9e4d", "dirty": True}
    assert release.release_hash(body["files"]) == name
    assert abs(body["deployed_at"] - time.time()) < 60


def test_only_what_is_lacking_travels_and_the_rest_is_hashed_and_reused(box: Box) -> None:
    first = box.deploy()["release"]
    box.write("prog/a.py", "graphs = True\n")
    snapshot = box.snapshot()
    request = box.request(snapshot)
    with tarfile.open(box.archive(request["id"])) as tar:
        assert len(tar.getnames()) == 1
    done = install.install_release(request, Emit())
    assert (done["before"], done["switched"]) == (first, True)
    assert sorted(box.releases()) == sorted([first, snapshot.release])
    inode = [
        (box.code_root / "releases" / name / "run.sh").stat().st_ino for name in (first, snapshot.release)
    ]
    assert inode[0] != inode[1], "a small file is copied: an edit in place must not reach another release"


def test_a_large_unchanged_file_is_linked(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_tree, "LINK_FROM_BYTES", 4)
    first = box.deploy()["release"]
    box.write("prog/a.py", "graphs = True\n")
    second = box.deploy()["release"]
    files = [(box.code_root / "releases" / name / "run.sh").stat() for name in (first, second)]
    assert files[0].st_ino == files[1].st_ino
    (box.source / "run.sh").chmod(0o644)  # a link shares its mode: another mode needs a copy
    third = box.deploy()["release"]
    assert (box.code_root / "releases" / third / "run.sh").stat().st_mode & 0o777 == 0o644
    assert (box.code_root / "releases" / second / "run.sh").stat().st_mode & 0o777 == 0o755


def test_the_same_code_again_sends_nothing_and_switches_nothing(box: Box) -> None:
    box.deploy()
    snapshot = box.snapshot()
    request = box.request(snapshot)
    assert request["archive_size"] is None
    before = (box.code_root / "current").lstat().st_ino
    done = install.install_release(request, Emit())
    assert (done["switched"], done["reused"], done["verified"]) == (False, True, 5)
    assert (box.code_root / "current").lstat().st_ino == before
    assert len(release.history(str(box.code_root))) == 1


def test_an_older_release_is_switched_back_to_without_sending(box: Box) -> None:
    first = box.deploy()["release"]
    old = (box.source / "prog/a.py").read_text()
    box.write("prog/a.py", "other = 1\n")
    second = box.deploy()["release"]
    box.write("prog/a.py", old)
    done = box.deploy()
    assert (done["release"], done["before"], done["switched"], done["reused"]) == (first, second, True, True)
    assert release.previous_release(str(box.code_root)) == second


def test_links_and_empty_folders_arrive(box: Box) -> None:
    (box.source / "link").symlink_to("prog/a.py")
    (box.source / "hollow").mkdir()
    name = box.deploy()["release"]
    there = box.code_root / "releases" / name
    assert str((there / "link").readlink()) == "prog/a.py"
    assert (there / "hollow").is_dir()
    assert box.deploy()["reused"]


# --- releases that are not what they were -------------------------------------------------------------------


def test_a_changed_file_of_an_older_release_is_asked_for_again(box: Box) -> None:
    first = box.deploy()["release"]
    shared = box.code_root / "releases" / first / "prog" / "data.txt"
    shared.write_text("edited in place\n")
    (box.code_root / "releases" / first / "prog" / "copy.txt").write_text("edited too\n")
    box.write("prog/a.py", "x = 3\n")
    snapshot = box.snapshot()
    answer = install.install_release(box.request(snapshot), Emit())
    sha = next(file.sha256 for file in snapshot.files if file.path == "prog/data.txt")
    assert answer == {"missing": [sha]}
    assert box.current() == first
    assert box.litter() == []
    with_it = box.request(snapshot)
    files = [file for file in snapshot.files if file.path in ("prog/a.py", "prog/data.txt")]
    with_it["archive_size"] = write_archive(snapshot, files, box.archive(with_it["id"]))
    assert install.install_release(with_it, Emit())["switched"]
    assert (box.code_root / "current" / "prog" / "copy.txt").read_text() == "same\n"


@pytest.mark.parametrize("how", ["changed", "extra", "missing", "mode"])
def test_a_release_that_was_changed_in_place_is_built_anew(box: Box, how: str) -> None:
    name = box.deploy()["release"]
    there = box.code_root / "releases" / name
    if how == "changed":
        (there / "prog/a.py").write_text("sabotage\n")
    elif how == "extra":
        (there / "prog/json.py").write_text("")
    elif how == "missing":
        (there / "prog/data.txt").unlink()
    else:
        (there / "run.sh").chmod(0o644)
    snapshot = box.snapshot()
    assert release.differences(str(there), snapshot.manifest())  # type: ignore[arg-type]
    request = box.request(snapshot)
    answer = install.install_release(request, Emit())
    if "missing" in answer:
        request = box.request(snapshot)
        lacking = [file for file in snapshot.files if file.sha256 in answer["missing"]]
        request["archive_size"] = write_archive(snapshot, lacking, box.archive(request["id"]))
        answer = install.install_release(request, Emit())
    assert not answer["reused"]
    assert release.differences(str(there), snapshot.manifest()) == []  # type: ignore[arg-type]
    assert box.current() == name
    assert box.litter() == []


def test_a_changed_release_that_a_live_run_uses_is_never_touched(box: Box) -> None:
    name = box.deploy()["release"]
    run = box.run(name)
    changed = box.code_root / "releases" / name / "prog/a.py"
    changed.write_text("edited by hand\n")
    with refused() as caught:
        box.deploy()
    assert f"run {run} uses it" in caught[0].what
    assert "prog/a.py: sha256 is" in caught[0].what
    assert changed.read_text() == "edited by hand\n"
    assert box.litter() == []


def test_pythons_caches_are_no_change(box: Box) -> None:
    name = box.deploy()["release"]
    cache = box.code_root / "releases" / name / "prog" / "__pycache__"
    cache.mkdir()
    (cache / "a.cpython-311.pyc").write_bytes(b"x")
    assert box.deploy()["reused"]


# --- keeping and sweeping -----------------------------------------------------------------------------------


def versions(box: Box, count: int, **changes: Any) -> list[str]:
    names = []
    for number in range(count):
        box.write("prog/a.py", f"x = {number}\n")
        names.append(box.deploy(**changes)["release"])
    return names


def test_old_releases_are_pruned_by_age_of_use(box: Box) -> None:
    names = versions(box, 4, keep=2)
    assert sorted(box.releases()) == sorted(names[2:])
    assert box.litter() == []


def test_the_previous_release_and_those_of_live_runs_stay(box: Box) -> None:
    names = versions(box, 1, keep=1)
    box.run(names[0])
    ended = versions(box, 2, keep=1)[1]
    box.run(ended, live=False)
    rebooted = ended
    box.run(rebooted, elsewhere=True)
    box.write("prog/a.py", "y = 1\n")
    done = box.deploy(keep=1)
    box.write("prog/a.py", "y = 2\n")
    last = box.deploy(keep=1)
    assert sorted(box.releases()) == sorted([names[0], done["release"], last["release"]])
    assert ended in last["pruned"]


def test_a_record_that_cannot_be_read_still_pins(box: Box) -> None:
    names = versions(box, 1, keep=1)
    run = box.run(names[0])
    record = box.state_dir / "runs" / run / "record.json"
    record.write_text(record.read_text()[:-20])
    versions(box, 3, keep=1)
    assert names[0] in box.releases()


def test_what_a_killed_deploy_left_is_swept(box: Box) -> None:
    box.deploy()
    (box.code_root / "releases" / ".tmp-dead").mkdir()
    (box.code_root / "releases" / ".tmp-dead" / "x").write_text("x")
    (box.code_root / "releases" / ".old-dead").mkdir()
    (box.code_root / ".current-dead").symlink_to("releases/x")
    stale, fresh = box.code_root / ".incoming-dead.tar", box.code_root / ".incoming-beef.tar"
    for path in (stale, fresh):
        path.write_text("x")
    os.utime(stale, (1, 1))
    box.write("prog/a.py", "z = 1\n")
    box.deploy()
    assert box.litter() == [".incoming-beef.tar"], "another deploy may be pushing this one right now"
