"""What the agent reads for `doctor`, on this machine and on made-up files.

Run: python -m pytest tests/unit/test_doctor_agent.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.doctor import doctor_host, doctor_inside, doctor_place, doctor_torch
from dflashctl.agent.releases import hostlock

GONE = {"exit": None, "stdout": "", "stderr": "", "problem": "missing"}


def said(stdout: str = "", exit: int = 0, stderr: str = "") -> dict[str, Any]:
    return {"exit": exit, "stdout": stdout, "stderr": stderr, "problem": None}


# --- links of a container lead nowhere outside of it


def test_links_are_followed_as_in_the_container(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/lib/deep").mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "abs").symlink_to("/usr/lib")
    (root / "out").symlink_to("/../../../../etc")
    (root / "usr/up").symlink_to("../../../../usr/lib/deep")
    (root / "round").symlink_to("round")
    top = str(root)
    assert doctor_place.resolve(top, "/lib/deep") == f"{top}/usr/lib/deep"
    assert doctor_place.resolve(top, "/abs/deep") == f"{top}/usr/lib/deep"
    assert doctor_place.resolve(top, "/usr/up") == f"{top}/usr/lib/deep"
    assert doctor_place.resolve(top, "/out/passwd") == f"{top}/etc/passwd"
    with pytest.raises(OSError):
        doctor_place.resolve(top, "/round")
    assert "problem" in doctor_place.folder(top, "/round/x")


def test_a_folder_that_is_not_there_is_judged_by_its_nearest_parent(tmp_path: Path) -> None:
    found = doctor_place.folder("", str(tmp_path / "a/b/c"))
    assert (found["exists"], found["at"], found["writable"]) == (False, str(tmp_path), True)
    assert found["free"] > 0 and found["size"] >= found["free"]
    outside = doctor_place.folder(str(tmp_path), "/a/b")
    assert (outside["at"], outside["writable"]) == ("/", None)


def test_nodes_tell_files_from_devices(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    (dev / "nvidia-caps").mkdir(parents=True)
    (dev / "nvidia-uvm").touch()
    (dev / "nvidia7").symlink_to("/dev/null")
    (dev / "null").touch()
    assert doctor_place.nodes(str(tmp_path)) == [
        {"name": "nvidia-uvm", "kind": "file", "major": None, "minor": None, "usable": None}
    ]


def test_libraries_are_known_by_their_versions(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    for name in ("libcuda.so.580.65.06", "libcuda.so.1", "libnvidia-ml.so.570.1", "libcudart.so.12.4.127"):
        (folder / name).touch()
    assert doctor_place.libraries(str(tmp_path)) == {"cuda": ["580.65.06"], "nvidia-ml": ["570.1"]}


# --- memory


def group(top: Path, path: str, **files: str) -> None:
    (top / path).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (top / path / name.replace("_", ".", 1)).write_text(text)


def test_the_tightest_limit_above_a_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_place, "CGROUPS", str(tmp_path))
    group(tmp_path, "lxc/200/ns/init.scope", memory_max="max\n")
    group(
        tmp_path,
        "lxc/200",
        memory_max="2147483648\n",
        memory_current="1000\n",
        memory_events="low 0\noom 4\noom_kill 3\n",
    )
    group(tmp_path, "lxc", memory_max="68719476736\n", memory_current="5\n", memory_events="oom_kill 9\n")
    found = doctor_place.memory("0::/lxc/200/ns/init.scope\n", inside=False)
    assert found == {"limit": 2 << 30, "used": 1000, "oom_kills": 3, "total": None}
    assert (doctor_place.memory("", inside=True)["total"] or 0) > 2**28


def test_version_1_says_no_limit_with_a_large_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_place, "CGROUPS", str(tmp_path))
    top = tmp_path / "memory"
    for path, limit in (("", 9223372036854771712), ("lxc/200", 536870912)):
        (top / path).mkdir(parents=True, exist_ok=True)
        (top / path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    assert doctor_place.memory("9:cpu,memory:/lxc/200\n", inside=False)["limit"] == 512 << 20
    assert doctor_place.memory("9:cpu,memory:/other\n", inside=False)["limit"] is None


# --- the host


def test_majors_are_those_of_character_devices() -> None:
    text = (
        "Character devices:\n  1 mem\n195 nvidia-frontend\n508 nvidia-uvm\n\nBlock devices:\n  9 nvidia-x\n"
    )
    assert doctor_host.majors(text) == {"nvidia-frontend": 195, "nvidia-uvm": 508}


def test_binds_are_folders_of_the_host_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "staging").mkdir(parents=True)
    (tmp_path / "other-name").symlink_to(shared)
    config = (
        f"mp0: {shared},mp=/srv/host,ro=1\n"
        "mp1: local-zfs:subvol-200-disk-1,mp=/data,size=8G\n"
        "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n"
        "lxc.mount.entry: /nowhere srv/nowhere none bind,create=dir\n"
        "lxc.mount.entry: tmpfs srv/small tmpfs size=8m 0 0\n"
    )
    found = doctor_host.binds(config, str(tmp_path / "other-name/staging"))
    assert [(each["key"], each["target"], each["holds_staging"]) for each in found] == [
        ("mp0", "/srv/host", True),
        ("lxc.mount.entry", "/srv/nowhere", False),
    ]
    assert not doctor_host.binds(config, str(tmp_path))[0]["holds_staging"], "above it is not in it"
    assert doctor_host.binds(config, str(shared / "not/yet/there"))[0]["holds_staging"]


XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


def test_the_journal_comes_before_the_kernels_buffer() -> None:
    both = doctor_host.kernel_log(said(f"10:00 kernel: {XID}\n"), said("other\n"))
    assert both == {"lines": [f"10:00 kernel: {XID}"], "from": "journalctl", "problem": None}
    none = doctor_host.kernel_log(said("-- No entries --\n", 1), said(f"{XID}\n"))
    assert none["lines"] == [] and none["from"] == "journalctl"
    hint = "Hint: You are currently not seeing messages from other users and the system.\n"
    for journal in (GONE, said("", 0, hint), said("", 1, "Compiled without pattern matching support\n")):
        found = doctor_host.kernel_log(journal, said(f"a\n{XID}\n"))
        assert found == {"lines": [XID], "from": "dmesg", "problem": None}
    neither = doctor_host.kernel_log(GONE, said("", 1, "dmesg: Operation not permitted\n"))
    assert neither == {"lines": [], "from": None, "problem": "dmesg: Operation not permitted"}


def test_this_machine_answers_as_a_host_without_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # it adds to it, being a process of its own elsewhere
    events: list[dict[str, Any]] = []
    request = {
        "container": None,
        "python": sys.executable,
        "code_root": str(tmp_path / "code"),
        "staging_dir": str(tmp_path),
        "paths": [str(tmp_path)],
    }
    before = time.time()
    found = doctor_host.doctor_host(request, events.append)
    assert before <= events[0]["clock"] <= time.time()
    assert found["container"] is None and found["proxmox"] is None
    assert found["python"]["exists"] is True and found["staging"]["exists"] is True
    assert found["simulated"] is False and json.dumps(found)


def test_a_deploy_lock_in_use_is_named_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = tmp_path / "locks"
    monkeypatch.setattr(hostlock, "folder_name", lambda: str(locks))
    request = {"container": 200, "code_root": "/root/dflash"}
    assert hostlock.holder(doctor_host.deploy_lock(request)) is None and not locks.exists()
    path = hostlock.lock_path(200, "/root/dflash")
    with hostlock.HostLock(path, {"who": "anna@laptop"}, 0.0, lambda found: None):
        found = hostlock.holder(doctor_host.deploy_lock(request))
    assert found is not None and found["who"] == "anna@laptop" and found["held_s"] >= 0


# --- the inside


def ask(tmp_path: Path, script: str, timeout_s: float = 30.0, **env: str) -> tuple[dict[str, Any], list[Any]]:
    """What is made of a Python that does this instead."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    events: list[Any] = []
    request = {"torch_timeout_s": timeout_s, "env": env}
    return doctor_inside.ask_torch(str(python), request, events.append), events


def test_the_child_tells_step_by_step_and_noise_is_passed_over(tmp_path: Path) -> None:
    script = (
        """echo 'DOCTOR {"step": "packages", "a": 1}'; echo noise; echo 'DOCTOR {broken'; echo warn >&2"""
    )
    found, _ = ask(tmp_path, script)
    assert (found["said"], found["problem"], found["stderr"]) == ({"packages": {"a": 1}}, None, "warn")


def test_a_child_that_dies_leaves_what_it_said_and_how_it_ended(tmp_path: Path) -> None:
    found, _ = ask(tmp_path, """echo 'DOCTOR {"step": "cuda"}'; kill -SEGV $$""")
    assert found["said"] == {"cuda": {}} and found["problem"] == "its process ended with signal 11"
    assert ask(tmp_path, "exit 3")[0]["problem"] == "its process ended with exit code 3"
    missing = doctor_inside.ask_torch(str(tmp_path / "none"), {}, lambda event: None)
    assert "No such file" in missing["problem"]


def test_a_child_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = f"""echo 'DOCTOR {{"step": "cuda"}}'; sleep 600 & echo $! > {tmp_path}/child; wait"""
    found, events = ask(tmp_path, script, 4.0)
    assert found["said"] == {"cuda": {}} and found["problem"] == "timeout"
    assert len(events) > 1 and events[0]["torch_s"] < events[1]["torch_s"], "signs of life while it waits"
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_child_runs_in_the_environment_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_SESSION", "1")
    script = """printf 'DOCTOR {"step": "env", "hf": "%s", "own": "%s"}\\n' "$HF_HOME" "$OF_THE_SESSION" """
    assert ask(tmp_path, script, HF_HOME="/hf")[0]["said"] == {"env": {"hf": "/hf", "own": ""}}


class Driver:
    """libcuda.so.1 of two H200s, the first of which does not reach the other; an older one, without 125."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = {999: b"CUDA_ERROR_UNKNOWN"}[code]
        return 0

    def cuDriverGetVersion(self, value: Any) -> int:
        value._obj.value = 13000
        return 0

    def cuDeviceGetCount(self, value: Any) -> int:
        value._obj.value = 2
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: int) -> int:
        known = {20: 3 * device, 41: 1, 75: 9, 76: 0}
        if which not in known:
            return 1
        value._obj.value = known[which]
        return 0

    def cuDeviceCanAccessPeer(self, value: Any, one: int, other: int) -> int:
        value._obj.value = 0 if (one, other) == (0, 1) else 1
        return 0


def test_the_driver_is_asked_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver has no function that would make one."""
    monkeypatch.setattr("ctypes.CDLL", lambda name: {"libcuda.so.1": Driver()}[name])
    device = {"capability": [9, 0], "compute_mode": 0, "unified": 1, "ipc_events": None}
    assert doctor_torch.cuda() == {
        "problem": None,
        "error": None,
        "version": "13.0",
        "devices": [device, device | {"compute_mode": 3}],
        "peers": [[True, False], [True, True]],
    }
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver(999))
    assert doctor_torch.cuda() == {"problem": None, "error": "CUDA_ERROR_UNKNOWN"}


@pytest.mark.parametrize("root", [False, True])
def test_a_python_that_is_none_is_told_by_what_it_is(root: bool, tmp_path: Path) -> None:
    """Also from a container's host, for which links lead into the container."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "plain").write_text("x")
    (tmp_path / "bin" / "good").symlink_to(sys.executable)
    gone = "/gone/python3.10" if root else str(tmp_path / "gone")
    (tmp_path / "bin" / "python3").symlink_to(gone)
    (tmp_path / "bin" / "python").symlink_to("python3")
    top, place = (str(tmp_path), "") if root else ("", str(tmp_path))

    def told(name: str) -> tuple[bool, str]:
        found = doctor_host.interpreter(top, f"{place}/{name}")
        return found["exists"], found["broken"]

    assert told("bin/python") == (False, f"leads to {gone}, which is not there")
    assert told("bin/plain") == (False, "is not executable")
    assert told("bin") == (False, "is a folder")
    assert told("bin/none") == told("none/python") == (False, "")
    if not root:
        assert told("bin/good") == (True, "")


def compilers(folder: Path, script: str = "") -> str:
    """A PATH with a gcc that does as `script` says; without one an empty folder."""
    if script:
        (folder / "gcc").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "gcc").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("script", "cc", "found", "problem"),
    [
        ("", None, False, ""),
        ("", "gcc-13", False, ""),
        ("exit 0", None, True, ""),
        (
            "echo 'In file included' >&2; echo 'a.c:1: fatal error: Python.h: No such file' >&2; exit 1",
            None,
            True,
            "a.c:1: fatal error: Python.h: No such file",
        ),
        ("exit 4", None, True, "exit code 4"),
    ],
)
def test_a_compiler_is_found_as_triton_finds_it_and_tried(
    script: str, cc: str | None, found: bool, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", compilers(tmp_path, script))
    monkeypatch.delenv("CC", raising=False)
    if cc:
        monkeypatch.setenv("CC", cc)
    expected = cc or (str(tmp_path / "gcc") if script else None)
    assert doctor_torch.compiler() == {
        "command": expected, "found": found, "problem": problem, "python": list(sys.version_info[:2]),
    }  # fmt: skip


def test_the_real_child_names_this_pythons_packages(tmp_path: Path) -> None:
    from importlib.metadata import version

    found = doctor_inside.doctor_inside(
        {"paths": [str(tmp_path)], "env": {}, "python": sys.executable}, lambda event: None
    )
    said = found["torch"]["said"]
    assert said["packages"]["versions"]["torch"] == version("torch") == said["torch"]["version"]
    assert said["torch"]["count"] == len(said["cuda"].get("devices") or [])
    assert found["torch"]["problem"] is None
    assert found["version"] == list(sys.version_info[:3]) and found["uid"] == os.getuid()
    assert found["place"]["folders"][0]["writable"] is True
