"""The system calls below the lab, in namespaces of the test's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lab_client import REPOSITORY

pytestmark = pytest.mark.lab

PREPARE = """
import os, sys
from dflashctl.lab import ns
ns.enter()
place = sys.argv[1]
for name in ("source/inner", "target"):
    os.makedirs(f"{place}/{name}")
ns.mount("tmpfs", f"{place}/source/inner", "tmpfs", ns.MS_NODEV | ns.MS_NOEXEC | ns.MS_NOSUID)
def writable(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.strerror
    return True
"""


def run(code: str, place: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PREPARE + code, str(place)],
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("kernel", ["new", "before 5.12"])
def test_a_tree_of_mounts_becomes_read_only(tmp_path: Path, kernel: str) -> None:
    number = "" if kernel == "new" else "ns._SYS_MOUNT_SETATTR = 9999\n"
    code = f"""{number}
ns.bind(place + "/source", place + "/target", read_only=True)
for path in ("target/f", "target/inner/f", "source/f", "source/inner/f"):
    print(writable(f"{{place}}/{{path}}"))
"""
    place = tmp_path / "a place"  # mountinfo escapes the space
    assert run(code, place) == ["Read-only file system", "Read-only file system", "True", "True"]


def test_the_caller_is_root_of_one_user_and_still_itself_outside(tmp_path: Path) -> None:
    code = """
print(os.getuid(), os.getgid(), open("/proc/self/uid_map").read().split()[2])
open(place + "/mine", "w").close()
"""
    assert run(code, tmp_path) == ["0 0 1"]
    assert (tmp_path / "mine").stat().st_uid == tmp_path.stat().st_uid


def test_a_second_pivot_leaves_the_old_root_behind(tmp_path: Path) -> None:
    code = """
from dflashctl.lab import rootfs
from dflashctl.lab.rootfs import Step
os.makedirs(place + "/root"); open(place + "/outside", "w").close()
if os.fork() == 0:
    rootfs.build(place + "/root", [Step("dir", "/a/b"), Step("proc", "/proc"), Step("link", "/a/l", "b"),
                                   Step("bind", "/none", "/no/such", optional=True)])
    print(sorted(os.listdir("/")), os.readlink("/a/l"), os.path.exists(place), os.listdir("/proc").count("1"))
    sys.stdout.flush(); os._exit(0)
assert os.wait()[1] == 0
"""
    assert run(code, tmp_path) == ["['a', 'proc'] b False 1"]


def test_a_missing_source_names_itself(tmp_path: Path) -> None:
    code = """
from dflashctl.lab import rootfs
os.makedirs(place + "/root")
if os.fork() == 0:
    try:
        rootfs.build(place + "/root", [rootfs.Step("bind", "/x", "/no/such")])
    except ns.StageError as error:
        print(error.stage, error.errno, error); sys.stdout.flush()
    os._exit(0)
os.wait()
"""
    assert run(code, tmp_path) == ["mount 2 mount bind /x: No such file or directory"]
