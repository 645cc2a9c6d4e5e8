"""Deploys that meet full disks, and dead, locked, frozen and misconfigured containers.

After each: the old release still runs, no half state, no lock, no staging is left, and the message says what
to do. Run: python -m pytest tests/bed/test_deploy_places.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bedkit.bed import Bed
from deploy_faults import CONTAINER_DOWN, LOCKED, NOT_FOUND, VERIFICATION, Case, config_lock, host_script

pytestmark = pytest.mark.bed


@pytest.fixture
def case(bed: Bed, tmp_path: Path) -> Case:
    return Case(bed, tmp_path / "project")


# --- disks --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_host_disk(bed: Bed) -> Iterator[Path]:
    """A staging folder on a file system of 8 MiB on the host."""
    folder = bed.layout.home / "small"
    bed.on_host(["sh", "-c", f"mkdir -p {folder} && mount -t tmpfs -o size=8m,mode=755 none {folder}"])
    yield folder
    bed.on_host(["umount", str(folder)])


def test_a_full_disk_on_the_host(bed: Bed, tmp_path: Path, small_host_disk: Path) -> None:
    case = Case(bed, tmp_path / "project")
    case.entry["staging_dir"] = str(small_host_disk)
    case.directly()
    case.change()
    said = case.refused(VERIFICATION)
    assert "not enough space on the host" in said and "nothing was sent" in said
    assert "staging_dir" in said and str(small_host_disk) in said
    case.entry["staging_dir"] = str(case.staging)
    case.unharmed()


def test_a_full_disk_in_the_container(bed: Bed, tmp_path: Path) -> None:
    mount = "mkdir -p /workspace/small && mount -t tmpfs -o size=12m none /workspace/small"
    bed.inside("main", ["sh", "-c", mount])
    try:
        case = Case(bed, tmp_path / "project", code_root="/workspace/small/code")
        case.change(noise=2_000_000)
        fill = "head -c 7m /dev/zero > /workspace/small/filler"
        bed.inside("main", ["sh", "-c", fill])
        said = case.refused(VERIFICATION)
        assert "not enough space" in said and "nothing was sent" in said
        # The disk fills between the look and the push: pct cuts the file short and says nothing.
        bed.inside("main", ["rm", "/workspace/small/filler"])
        full = (
            f"case $1 in push) nsenter -t {bed.pid} true; lxc-attach -P {bed.layout.lxc} -n {bed.ids['main']}"
        )
        full += " -- sh -c 'cat /dev/zero > /workspace/small/filler' 2>/dev/null;; esac; exec $REAL \"$@\""
        with host_script(bed, "pct", full):
            said = case.refused(VERIFICATION)
        assert "No space left on device" in said or "the archive arrived with" in said
        bed.inside("main", ["rm", "/workspace/small/filler"])
        case.wrong = list  # type: ignore[method-assign]  # its file system is the container's alone
        case.unharmed()
    finally:
        bed.inside("main", ["umount", "-l", "/workspace/small"])


def test_a_read_only_file_system(bed: Bed, tmp_path: Path) -> None:
    mount = "mkdir -p /workspace/ro && mount -t tmpfs -o size=32m none /workspace/ro"
    bed.inside("main", ["sh", "-c", mount])
    try:
        case = Case(bed, tmp_path / "project", code_root="/workspace/ro/code")
        case.change()
        bed.inside("main", ["mount", "-o", "remount,bind,ro", "/workspace/ro"])
        said = case.refused(VERIFICATION)
        assert "Read-only file system" in said and "mount it writable" in said
        bed.inside("main", ["mount", "-o", "remount,bind,rw", "/workspace/ro"])
        case.wrong = list  # type: ignore[method-assign]
        case.unharmed()
    finally:
        bed.inside("main", ["umount", "-l", "/workspace/ro"])


# --- pct ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nothing arrives", "half arrives"])
def test_a_push_that_fails_and_exits_with_0(case: Case, how: str) -> None:
    case.change()
    if how == "nothing arrives":
        text = "case $1 in push) echo 'failed to create file: x: Permission denied' >&2; exit 0;; esac"
    else:
        text = (
            "case $1 in push) head -c 1000 $3 > $3.cut; $REAL push $2 $3.cut $4 --perms 0600;"
            " rm $3.cut; exit 0;; esac"
        )
    with host_script(case.bed, "pct", text + '\nexec $REAL "$@"'):
        said = case.refused(VERIFICATION)
    assert ("did not arrive (pct: failed to create file" in said) == (how == "nothing arrives")
    assert ("arrived with 1000 of" in said) == (how == "half arrives")
    case.unharmed()


def test_a_bind_mount_that_is_the_staging_folder_itself(bed: Bed, tmp_path: Path) -> None:
    """/srv/host inside is a folder of the host; staging lies in it, and so does the script itself."""
    bed.on_host(["sh", "-c", f"mkdir -m 777 {bed.layout.shared}/code {bed.layout.shared}/stage"])
    case = Case(bed, tmp_path / "p", code_root="/srv/host/code", staging_dir=f"{bed.layout.shared}/stage")
    case.staging = bed.layout.shared / "stage"
    case.wrong = list  # type: ignore[method-assign]
    case.change()
    case.unharmed()
    recipe = case.project.folder / "recipes" / "script.yaml"
    source = case.project.folder / "train.py"
    text = "print('the one and only copy')\n"
    source.write_text(text)
    (bed.layout.shared / "train.py").write_text(text)
    bed.on_host(["chown", "100000:100000", str(bed.layout.shared / "train.py"), str(bed.layout.shared)])
    recipe.write_text(
        "version: 1\nname: script\n"
        "deploy: {include: [train.py], to: /srv/host/train.py}\n"
        "launch: {command: [python, /srv/host/train.py]}\n"
    )
    source.unlink()
    source.symlink_to(bed.layout.shared / "train.py")  # refused as a link that leaves the tree
    done = case.project.run("deploy", "-r", "script")
    assert done.returncode == 2 and (bed.layout.shared / "train.py").read_text() == text
    source.unlink()
    source.hardlink_to(bed.layout.shared / "train.py") if same_disk(source, bed.layout.shared) else (
        source.write_text(text)
    )
    done = case.project.ok("deploy", "-r", "script")
    assert (bed.layout.shared / "train.py").read_text() == text == source.read_text()


def same_disk(one: Path, other: Path) -> bool:
    return one.parent.stat().st_dev == other.stat().st_dev


def test_a_frozen_container_in_the_middle(case: Case) -> None:
    """Frozen after the archive was pushed: the host's desk cannot take it back; the next deploy can."""
    case.change()
    freeze = f"lxc-freeze -P {case.bed.layout.lxc} -n {case.bed.ids['main']}"
    with host_script(case.bed, "pct", f'$REAL "$@"; code=$?; case $1 in push) {freeze};; esac; exit $code'):
        said = case.refused(CONTAINER_DOWN)
    assert "frozen" in said
    case.bed.thaw("main")
    left = [name for name in case.litter() if not name.startswith(".incoming-")]
    assert left == []
    case.bed.inside(
        "main", ["sh", "-c", f"touch -d '10 minutes ago' {case.code}/.incoming-* 2>/dev/null; true"]
    )
    assert case.current() == case.before
    case.deploy()
    assert case.litter() == []


def test_a_container_that_stops_in_the_middle(case: Case) -> None:
    case.change()
    stop = f"lxc-stop -k -P {case.bed.layout.lxc} -n {case.bed.ids['main']}"
    with host_script(case.bed, "pct", f'case $1 in push) {stop};; esac\nexec $REAL "$@"'):
        said = case.refused(CONTAINER_DOWN)
    assert "pct start" in said
    case.bed.start("main")
    case.unharmed()


def test_a_container_on_another_node(case: Case) -> None:
    case.entry["container"] = 998
    case.directly()
    said = case.refused(NOT_FOUND)
    assert "there is no container 998 on node" in said and "another node of the cluster" in said
    case.entry["container"] = case.bed.ids["main"]
    case.change()
    case.unharmed()


def test_a_configuration_lock_for_3_s_is_waited_for(case: Case) -> None:
    case.change()
    with config_lock(case.bed, 3):
        started = time.monotonic()
        case.deploy()
        assert time.monotonic() - started >= 1.5
    assert case.litter() == [] and case.current() != case.before


@pytest.mark.soak
def test_a_configuration_lock_for_30_s_is_waited_for_and_its_holder_named(case: Case) -> None:
    case.change()
    with config_lock(case.bed, 30):
        done = case.project.ok("deploy", timeout=120)
    assert done.returncode == 0
    case.change()
    with config_lock(case.bed, 100):
        said = case.refused(LOCKED, timeout=200)
    assert "sleep 100" in said and "is locked by another pct command" in said
    case.before = case.current()
    case.unharmed()


def test_a_wrong_uid_mapping_is_explained(bed: Bed, tmp_path: Path) -> None:
    bed.on_host(["sh", "-c", f"mkdir {bed.layout.shared}/theirs && chmod 755 {bed.layout.shared}/theirs"])
    case = Case(bed, tmp_path / "project")
    case.entry["code_root"] = "/srv/host/theirs/code"
    case.directly()
    said = case.refused(VERIFICATION)
    assert "cannot see (shown as nobody)" in said and "chown the folder behind it to 100000:100000" in said
    case.entry["code_root"] = case.code
    case.change()
    case.unharmed()
