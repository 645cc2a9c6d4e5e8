"""Run with: pytest tests/unit/test_cgroup.py. A run's own control group, where one can be made."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.processes import cgroup, kin, proc

UNIFIED = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
HYBRID = (
    "30 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n41 31 0:38 / /u rw - cgroup2 c rw\n"
)
BOUND = "29 23 0:26 /lxc/200/ns /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "mine", "folder"),
    [
        (UNIFIED, "0::/.lxc\n", "/sys/fs/cgroup/.lxc"),
        (UNIFIED, "0::/\n", "/sys/fs/cgroup"),
        (HYBRID, "4:memory:/x\n0::/user.slice/a b\n", "/u/user.slice/a b"),
        (BOUND, "0::/lxc/200/ns/init.scope\n", "/sys/fs/cgroup/init.scope"),
        (BOUND, "0::/lxc/200/ns\n", "/sys/fs/cgroup"),
        (BOUND, "0::/lxc/200/nsx\n", None),
        (UNIFIED, "0::/../201\n", None),
        (UNIFIED, "4:memory:/\n", None),
        ("", "0::/\n", None),
    ],
)
def test_where_our_own_group_is(mounts: str, mine: str, folder: str | None) -> None:
    assert cgroup.own_group(mounts, mine) == folder


def test_without_a_group_nothing_happens() -> None:
    assert cgroup.pids(None) == [] == cgroup.pids("/no/such/group")
    assert not cgroup.kill(None) and not cgroup.kill("/no/such/group")
    cgroup.enter(None)
    cgroup.enter("/no/such/group")
    cgroup.remove(None)
    assert not cgroup.is_ours(None, "x") and not cgroup.is_ours("/sys/fs/cgroup", "x")
    assert cgroup.is_ours("/sys/fs/cgroup/dflash-x", "x")


def test_what_such_files_say(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "cgroup.procs").write_text("12\n0\n13\n")
    (tmp_path / "below" / "cgroup.procs").write_text("14\n")
    assert sorted(cgroup.pids(str(tmp_path))) == [12, 13, 14], "0 is somebody outside our pid namespace"
    (tmp_path / "cgroup.kill").touch()
    assert cgroup.kill(str(tmp_path)) and (tmp_path / "cgroup.kill").read_text() == "1"


@pytest.fixture
def groups() -> None:
    """Says aloud where this cannot be shown."""
    path = cgroup.make(f"probe-{os.getpid()}")
    if path is None or not Path(path, "cgroup.kill").exists():
        pytest.skip("DID NOT RUN: cgroup.kill. It needs a writable cgroup v2 mount and Linux 5.14")
    cgroup.remove(path)


# Renamed, no environment, a session of its own, and no parent of ours any more once the supervisor is gone.
ESCAPES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, ["worker", "-c", "import time; time.sleep(600)"], {})
    os._exit(0)
os.wait()
open("ready", "w").close()
time.sleep(600)
"""


def test_a_family_without_any_other_mark_is_found_and_ended(groups: None, box: Any, until: Any) -> None:
    answer = box.python(ESCAPES)
    until((box.root / "ready").exists)
    run = box.run(answer)
    group = run.group()
    assert group is not None
    worker = until(lambda: [pid for pid in cgroup.pids(group) if proc.cmdline(pid)[:1] == ["worker"]])[0]
    identity = proc.read_process(worker).identity  # type: ignore[union-attr]
    supervisor = run.identities()[0]
    os.kill(supervisor[0], signal.SIGKILL)
    os.kill(answer["leader"]["pid"], signal.SIGKILL)
    until(lambda: not run.live())
    (Path(run.path) / "members.json").unlink(missing_ok=True)
    assert kin.run_of(worker) is None, "the environment does not give it away"
    assert box.stop(answer["id"], grace_s=0.2)["outcome"] == "killed"
    assert proc.living(identity) is None
    assert not Path(group).exists()


# One process at a time, each gone a moment after it has forked the next: a signal to a pid comes too late.
RELAY = """
import os, time
if os.fork():
    open("ready", "w").close()
    time.sleep(600)
end = time.monotonic() + 30
os.setsid()
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
"""


def test_what_flees_by_forking_is_caught(groups: None, box: Any, until: Any) -> None:
    answer = box.python(RELAY)
    until((box.root / "ready").exists)
    group = box.run(answer).group()
    assert box.stop(answer["id"], grace_s=0.2)["outcome"] == "killed"
    assert cgroup.pids(group) == []


def test_the_group_goes_with_the_run(groups: None, box: Any) -> None:
    answer = box.launch(["sh", "-c", "until [ -e go ]; do sleep 0.05; done"])
    group = box.run(answer).group()
    assert group is not None and answer["leader"]["pid"] in cgroup.pids(group)
    (box.root / "go").touch()
    box.wait(answer)
    assert not Path(group).exists()
