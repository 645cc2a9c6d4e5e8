"""Deploys that meet broken lines, full disks, dead and locked containers, other people and wrong clocks.

After each: the old release still runs, no half state, no lock, no staging is left, and the message says what
to do. Run: python -m pytest tests/bed/test_deploy_faults.py   (the whole campaign: -m soak)
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bedkit.bed import Bed
from bedkit.project import Project
from proxy import Proxy
from unproven import did_not_run

sys.path.insert(0, str(Path(__file__).parent))

from deploy_faults import Case, config_lock, host_script

pytestmark = pytest.mark.bed

UNREACHABLE, VERIFICATION, NOT_FOUND, LOCKED, CONTAINER_DOWN = 3, 4, 6, 8, 12
CUTS_EACH = 2
SEED = 20240607


@pytest.fixture
def case(bed: Bed, tmp_path: Path) -> Case:
    return Case(bed, tmp_path / "project")


# --- the line -----------------------------------------------------------------------------------------------


def whole_conversation(case: Case, proxy: Proxy) -> int:
    case.through(proxy.port)
    case.change()
    case.project.ok("deploy")
    case.before = case.current()
    return proxy.moved("up")


def cut_at(case: Case, proxy: Proxy, position: int) -> None:
    """Cut the connection after so many bytes, then look, then deploy again."""
    case.through(proxy.port)
    case.change()
    proxy.cut_after(position, "up")
    done = case.project.run("deploy", timeout=90)
    proxy.rules["up"].cut_at = None
    assert done.returncode in (0, UNREACHABLE), f"cut at {position}: {done.returncode} {done.stderr}"
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.stderr.count("error:") == 1
    case.unharmed(switched=False if done.returncode and position < 200_000 else None)


def test_the_line_cut_anywhere(case: Case, proxied: Proxy) -> None:
    whole = whole_conversation(case, proxied)
    rng = random.Random(SEED)
    steps = [rng.randrange(2_000, whole) for _ in range(CUTS_EACH - 1)] + [whole - 400]
    for position in steps:
        cut_at(case, proxied, position)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_line_cut_at_every_step(case: Case, proxied: Proxy) -> None:
    whole = whole_conversation(case, proxied)
    rng = random.Random(SEED + 1)
    for number in range(60):
        cut_at(case, proxied, rng.randrange(500, whole) if number % 3 else whole - 20 * number - 1)


def test_a_laptop_that_vanishes_without_a_goodbye_leaves_nothing(case: Case) -> None:
    """Killed outright while the archive is on its way: the host cleans up by itself."""
    case.change(noise=30_000_000)
    process = subprocess.Popen(
        case.project.argv("deploy"),
        cwd=case.project.folder,
        env=case.project.env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 90
        while not staged(case):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        folder = case.bed.on_host(["sh", "-c", f"stat -c '%a %U' {case.staging}/*"]).stdout
        assert folder == b"700 root\n"
    finally:
        process.kill()
        process.wait(10)
    case.unharmed()


def staged(case: Case) -> list[Path]:
    """The staging folders, looked at without a command of their own."""
    return list((Path(f"/proc/{case.bed.pid}/root") / str(case.staging).lstrip("/")).glob("*/archive"))


def test_staging_of_a_desk_that_was_killed_is_swept_by_the_next(case: Case) -> None:
    case.change(noise=30_000_000)
    process = subprocess.Popen(
        case.project.argv("deploy"),
        cwd=case.project.folder,
        env=case.project.env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 90
    while not staged(case):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    [lock] = Path(f"/proc/{case.bed.pid}/root/run/dflashctl").glob(f"ct{case.bed.ids['main']}-*.lock")
    holder = json.loads(lock.read_text())
    assert holder["what"].startswith("steady ") and lock.stat().st_mode & 0o777 == 0o600
    case.bed.on_host(["kill", "-9", str(holder["pid"])])
    _, said = process.communicate(timeout=60)
    assert process.returncode == UNREACHABLE and "Traceback" not in said
    assert len(staged(case)) == 1, "nobody was there to remove it"
    assert case.current() == case.before
    case.deploy()
    assert case.current() != case.before and case.litter() == []


# --- Ctrl-C -------------------------------------------------------------------------------------------------


def test_ctrl_c_at_every_step(case: Case) -> None:
    """While the lock is taken, while bytes travel, while it is pushed, while it is proven inside."""
    root = Path(f"/proc/{case.bed.pid}/root")
    inside = case.bed.layout.rootfs(case.bed.ids["main"])
    code = root / f"{inside}{case.code}".lstrip("/")
    lock = root / "run/dflashctl"
    moments = {
        "lock": lambda: any(lock.glob("ct*.lock")),
        "staged": lambda: staged(case),
        "incoming": lambda: any(code.glob(".incoming-*")),
        "building": lambda: any((code / "releases").glob(".tmp-*")),
    }
    for name, look in moments.items():
        case.change(noise=4_000_000)
        code_, said = case.interrupted_at(look)
        assert code_ in (0, 130, -2), f"{name}: {code_} {said}"
        assert "Traceback" not in said
        if code_ == 130 and name in ("lock", "staged"):
            assert "nothing was switched" in said, f"{name}: {said}"
        case.unharmed(switched=None if code_ == 0 or name == "building" else False)


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
