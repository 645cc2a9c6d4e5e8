"""How the Debian trees of the containers are made: what a build that is cut off leaves. With a slow stand-in
for mmdebstrap."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from bedkit import need, rootfs
from unproven import did_not_run

pytestmark = pytest.mark.bed

SLOW = """#!/bin/sh
for last; do :; done
mkdir "$last/dev"
mount --bind /dev "$last/dev"
sleep 7251 &
touch "$last/begun"
wait
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    reason = need.reason_against()
    if reason is not None:
        did_not_run(f"the bed. {reason}. To get it, {need.HOW}")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mmdebstrap"
    program.write_text(SLOW)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(rootfs, "BUILD_S", 10)
    return tmp_path


def sleepers() -> list[str]:
    told = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in told.splitlines() if line == "sleep 7251"]


def test_a_build_that_is_cut_off_leaves_neither_programs_nor_mounts(cache: Path) -> None:
    with pytest.raises(rootfs.RootfsError, match="not done after 10 s: a slow mirror"):
        rootfs._build(cache / "trixie-1", "trixie", ("procps",))
    left = list(cache.glob("trixie-1.part*"))
    assert [(each / "begun").exists() for each in left] == [True], "it was under way"
    assert str(cache) not in Path("/proc/mounts").read_text()
    end = time.monotonic() + 20
    while sleepers():
        assert time.monotonic() < end, "what it had started lives on"
        time.sleep(0.1)
    again = rootfs._fresh(cache / "trixie-1")
    assert list(cache.glob("trixie-1.part*")) == [again] and list(again.iterdir()) == []


def test_what_is_mounted_in_an_old_one_is_not_removed(cache: Path) -> None:
    mine, old = cache / "mine", cache / "trixie-1.part-old" / "dev"
    mine.mkdir()
    (mine / "kept").touch()
    old.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(mine), str(old)], check=True)
    try:
        part = rootfs._fresh(cache / "trixie-1")
        assert (mine / "kept").exists() and part != old.parent
    finally:
        subprocess.run(["umount", str(old)], check=True)
    rootfs._fresh(cache / "trixie-1")
    assert not old.parent.exists() and (mine / "kept").exists()
