"""The lab comes up, is found, goes, and leaves nothing, whatever happens on the way."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from lab_client import cli, cli_argv, enter, ssh
from own_lab import own as own
from own_lab import processes_of, start_cli

from dflashctl.agent.processes import proc
from dflashctl.errors import UsageError
from dflashctl.lab import layout, lifecycle
from dflashctl.lab.state import LabPaths, Record, load_endpoint, read_record

pytestmark = pytest.mark.lab


# --- the usual way ----------------------------------------------------------------------------------------


def test_the_fixture_lab_answers(lab: Record) -> None:
    assert load_endpoint() == lab.endpoint
    done = ssh(lab.endpoint, "hostname; exit 7")
    assert (done.returncode, done.stdout) == (7, b"pve1\n")


def test_up_status_up_down_down(tmp_path: Path) -> None:
    place = tmp_path / "l"
    paths = LabPaths(place)
    try:
        done = cli("lab", "status", lab_dir=place)
        assert done.returncode == 0 and "down" in done.stdout and "next: dflashctl lab up" in done.stdout
        first = cli("lab", "up", lab_dir=place)
        assert (first.returncode, first.stderr) == (0, "")
        port = json.loads(paths.record.read_text())["endpoint"]["port"]
        for word in (f"port {port}", "200, running", "8 simulated", "lab up in", f"-p {port}"):
            assert word in first.stdout
        again = cli("lab", "up", lab_dir=place)
        assert again.returncode == 0 and "up already" in again.stdout
        found = json.loads(cli("lab", "status", "--json", lab_dir=place).stdout)
        assert (found["schema"], found["up"], found["state"]) == ("dflashctl.lab/1", True, "up")
        assert (found["endpoint"]["port"], found["container_running"], found["gpus"]) == (port, True, 8)
        assert (
            len(processes_of(paths)) == 4
        )  # the host's first process, its two servers, the container's first
    finally:
        down = cli("lab", "down", lab_dir=place)
    assert (down.returncode, down.stdout) == (0, "the lab is down\n")
    assert not place.exists() and processes_of(paths) == []
    down = cli("lab", "down", lab_dir=place)
    assert (down.returncode, down.stdout) == (0, "the lab was not up\n")
    assert not place.exists()


def test_up_starts_a_container_that_has_stopped(tmp_path: Path) -> None:
    place = tmp_path / "l"
    try:
        assert cli("lab", "up", lab_dir=place).returncode == 0
        record = read_record(LabPaths(place))
        assert record is not None
        assert ssh(record.endpoint, "pct stop 200").returncode == 0
        assert json.loads(cli("lab", "status", "--json", lab_dir=place).stdout)["container_running"] is False
        again = cli("lab", "up", lab_dir=place)
        assert (again.returncode, again.stderr) == (0, "")
        assert "has been started" in again.stdout and "200, running" in again.stdout
        assert "has been started" not in cli("lab", "up", lab_dir=place).stdout
    finally:
        cli("lab", "down", lab_dir=place)


def test_no_down_comes_between_finding_the_lab_and_starting_its_container(own: LabPaths) -> None:
    ssh(lifecycle.up().record.endpoint, "pct stop 200")
    waiting: list[subprocess.Popen[str]] = []

    def start_container() -> None:
        waiting.append(start_cli(own, "lab", "down"))
        with pytest.raises(subprocess.TimeoutExpired):
            waiting[0].wait(1.5)  # it asks for the folder's lock, which `up` holds

    assert lifecycle.up(start_container).started_container
    assert waiting[0].communicate(timeout=60)[0] == "the lab is down\n"


@pytest.mark.alone
def test_up_is_quick(own: LabPaths) -> None:
    seconds = []
    for _ in range(3):
        seconds.append(lifecycle.up().seconds)
        lifecycle.down()
    assert min(seconds) < 2


@pytest.mark.parametrize(
    "name", ["with space", "it's", "naïve-名前", "100%h", 'q"u$o`te', "a:b,c=d", "back\\slash"]
)
def test_folders_with_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    paths = LabPaths(tmp_path / name / "lab")
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", str(paths.root))
    try:
        record = lifecycle.up().record
        assert ssh(record.endpoint, "nvidia-smi -L | wc -l").stdout == b"8\n"
        assert enter(record.endpoint, "echo x > /workspace/f").returncode == 0
    finally:
        lifecycle.down()
    assert not paths.root.exists()


def test_a_folder_reached_by_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("DFLASHCTL_LAB_DIR", str(tmp_path / "link/lab"))
    try:
        assert enter(lifecycle.up().record.endpoint, "hostname").stdout == b"ct200\n"
    finally:
        lifecycle.down()
    assert list((tmp_path / "real").iterdir()) == []


def test_keep_keeps_the_disks_only(own: LabPaths) -> None:
    record = lifecycle.up().record
    script = "echo kept > /workspace/f; echo kept > /root/f; echo gone > /run/f"
    assert enter(record.endpoint, script).returncode == 0
    assert lifecycle.down(keep=True)
    assert {p.name for p in own.root.iterdir()} <= {"node", "lab.lock", "host.log"}
    assert not lifecycle.down(keep=True)
    done = enter(lifecycle.up().record.endpoint, "cat /workspace/f /root/f; cat /run/f")
    assert (done.stdout, done.returncode) == (b"kept\nkept\n", 1)
    assert lifecycle.down() and not own.root.exists()


def test_what_a_program_left_unreadable_goes_with_the_lab(own: LabPaths) -> None:
    record = lifecycle.up().record
    script = "cd /workspace && mkdir -p a/b && echo x > a/b/f && chmod 0 a/b/f a/b a"
    script += "; mkfifo /root/pipe && ln -s / /root/l"
    assert enter(record.endpoint, script).returncode == 0
    assert lifecycle.down() and not own.root.exists()


def test_several_ups_at_once_make_one_lab(own: LabPaths) -> None:
    started = [start_cli(own, "lab", "up", "--json") for _ in range(4)]
    said = [json.loads(process.communicate(timeout=60)[0]) for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert sorted(each["already_up"] for each in said) == [False, True, True, True]
    assert len({each["endpoint"]["port"] for each in said}) == 1
    assert len([p for p in processes_of(own) if proc.read_process(p).comm == "lab-host"]) == 1


def test_ups_and_downs_at_once_end_in_a_state_that_is_whole(own: LabPaths) -> None:
    started = [start_cli(own, "lab", word) for word in ("up", "down", "up", "down", "up", "down")]
    for process in started:
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 0, text
    record = read_record(own)
    if record is None:
        assert processes_of(own) == []
    else:
        assert ssh(record.endpoint, "echo ok").stdout == b"ok\n"


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["lab", "up"], ["lab", "down"]])
def test_a_folder_of_other_files_is_refused(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = cli(*words, lab_dir=tmp_path)
    assert done.returncode == 2 and "not a lab's" in done.stderr and "DFLASHCTL_LAB_DIR" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def in_namespace(script: str, lab_dir: Path) -> list[str]:
    """Run a command after the script, in user and mount namespaces of its own (all of this machine is in
    sight). A lab that came up there by mistake is taken down there."""
    down = shlex.join(["env", f"DFLASHCTL_LAB_DIR={lab_dir}", *cli_argv("lab", "down")])
    whole = f'{script} || exit 99; "$@"; code=$?; {down} >/dev/null 2>&1; exit $code'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", whole, "sh"]


@pytest.mark.parametrize("size", ["4k", "20k", "40k", "60k", "80k"])
def test_a_full_disk_is_said(tmp_path: Path, size: str) -> None:
    place = tmp_path / "lab"
    full = f"mount -t tmpfs -o size={size} none '{tmp_path}'"
    done = cli("lab", "up", lab_dir=place, prefix=in_namespace(full, place))
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "No space left on device" in done.stderr and "make room" in done.stderr
    assert processes_of(LabPaths(place)) == []


def test_no_user_namespaces_is_said(tmp_path: Path) -> None:
    none = "echo 0 > /proc/sys/user/max_user_namespaces"
    done = cli("lab", "up", lab_dir=tmp_path / "lab", prefix=in_namespace(none, tmp_path / "lab"))
    assert done.returncode == 2 and "allows no user namespaces" in done.stderr
    assert "sudo sysctl -w user.max_user_namespaces" in done.stderr
    assert not (tmp_path / "lab").exists()


def test_a_masked_proc_is_said(tmp_path: Path) -> None:
    """As in a container of Docker: a new /proc would show what the mask hides, so the kernel refuses it."""
    masked = "mount -t tmpfs none /proc/sys"
    done = cli("lab", "up", lab_dir=tmp_path / "lab", prefix=in_namespace(masked, tmp_path / "lab"))
    assert done.returncode == 2 and "proc /proc: Operation not permitted" in done.stderr, done.stderr
    assert "nothing of the lab ever runs outside namespaces" in done.stderr


def test_a_lab_of_another_pid_namespace_is_left_alone(own: LabPaths) -> None:
    record = lifecycle.up().record
    here = own.record.read_text()
    own.record.write_text(layout.to_text(replace(record, pid_namespace=7).to_json()))
    for action in (lifecycle.up, lifecycle.down):
        with pytest.raises(UsageError, match="another pid namespace"):
            action()
    assert record.alive()
    own.record.write_text(here)
