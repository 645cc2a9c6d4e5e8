"""From the laptop through ssh and `pct` into the container: the lab as a whole. `pct` by itself is proven in
tests/conformance."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from lab_client import inside, ssh

from dflashctl.lab import lifecycle
from dflashctl.lab.state import LabPaths, Record

pytestmark = pytest.mark.lab


def test_the_node_lists_its_containers(lab: Record) -> None:
    done = ssh(lab.endpoint, "pct list; pct status 200; pct status 201; pct status 999")
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    assert rows == [
        ["VMID", "Status", "Lock", "Name"],
        ["200", "running", "ct200"],
        ["201", "stopped", "ct201"],
        ["status:", "running"],
        ["status:", "stopped"],
    ]
    assert (done.returncode, done.stderr) == (
        2,
        b"Configuration file 'nodes/pve1/lxc/999.conf' does not exist\n",
    )


def test_commands_run_in_the_container(lab: Record) -> None:
    done = inside(
        lab.endpoint, ["sh", "-c", "hostname; id -u; readlink /proc/self/ns/pid; echo err >&2; exit 7"]
    )
    host = ssh(lab.endpoint, "readlink /proc/self/ns/pid").stdout.decode().strip()
    name, user, namespace = done.stdout.decode().split()
    assert (name, user, done.stderr, done.returncode) == ("ct200", "0", b"err\n", 7)
    assert namespace.startswith("pid:") and namespace != host


def test_arguments_and_a_mebibyte_of_input_arrive(lab: Record) -> None:
    words = ["a b", "$HOME", "*", "", "'\"\\", "x\ny", "-n", "--"]
    code = "import sys, json; print(json.dumps(sys.argv[1:]))"
    done = inside(lab.endpoint, [lab.endpoint.python, "-I", "-c", code, *words])
    assert json.loads(done.stdout) == words
    data = os.urandom(1 << 20)
    assert inside(lab.endpoint, ["cat"], input=data).stdout == data


def test_a_file_goes_in_and_comes_back(lab: Record, lab_paths: LabPaths) -> None:
    there = "seq 100000 > /tmp/f && pct push 200 /tmp/f /root/f --perms 640"
    script = f"{there} && pct pull 200 /root/f /tmp/g && cmp /tmp/f /tmp/g"
    assert ssh(lab.endpoint, script).returncode == 0
    assert inside(lab.endpoint, ["stat", "-c", "%a %s", "/root/f"]).stdout == b"640 588895\n"


def test_source_and_destination_of_a_push_can_be_one_file(lab: Record) -> None:
    """/workspace is a folder of the host, so the real tool's trap is there too: the file is emptied."""
    ssh(lab.endpoint, "echo precious > /tank/workspace/same")
    done = ssh(
        lab.endpoint, "pct push 200 /tank/workspace/same /workspace/same; wc -c < /tank/workspace/same"
    )
    assert done.stdout.split()[-1] == b"0"
    ssh(lab.endpoint, "rm /tank/workspace/same")


def test_the_machines_python_opens_gpus_and_the_host_sees_who(lab: Record) -> None:
    env = [f"{name}={value}" for name, value in lab.endpoint.env.items()]
    code = "print('ready', flush=True); input()"
    argv = [
        "env",
        "-i",
        *env,
        "CUDA_VISIBLE_DEVICES=2,5",
        "DFLASH_LAB_GPU_MIB=7000",
        lab.endpoint.python,
        "-c",
        code,
    ]
    command = shlex.join(["pct", "exec", "200", "--", *argv])
    process = subprocess.Popen(
        [*lifecycle.ssh_argv(lab.endpoint), command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    query = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        apps = [line.split(", ") for line in ssh(lab.endpoint, query).stdout.decode().splitlines()]
        assert [memory for _, memory in apps] == ["7000", "7000"] and len({pid for pid, _ in apps}) == 1
        spaces = ssh(lab.endpoint, f"grep NSpid /proc/{apps[0][0]}/status").stdout.split()
        assert spaces[1].decode() == apps[0][0] and len(spaces) == 3  # its pid here, and in the container
    finally:
        process.communicate(b"\n", timeout=30)
    assert ssh(lab.endpoint, query).stdout == b""


def test_a_container_stops_and_starts(lab: Record) -> None:
    assert ssh(lab.endpoint, "pct start 201 && pct exec 201 -- hostname").stdout == b"ct201\n"
    assert ssh(lab.endpoint, "pct shutdown 201 && pct status 201").stdout == b"status: stopped\n"
    done = ssh(lab.endpoint, "pct exec 201 -- true")
    assert (done.returncode, done.stderr) == (255, b"container '201' not running!\n")


def test_status_tells_a_stopped_container(lab: Record) -> None:
    try:
        assert ssh(lab.endpoint, "pct stop 200").returncode == 0
        assert not lifecycle.status().container_running
    finally:
        assert ssh(lab.endpoint, "pct start 200").returncode == 0
    assert lifecycle.status().container_running


def test_twenty_calls_at_once(lab: Record) -> None:
    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(lambda n: inside(lab.endpoint, ["echo", str(n)]).stdout, range(20)))
    assert results == [b"%d\n" % n for n in range(20)]


def test_a_job_outlives_its_connection(lab: Record, lab_paths: LabPaths) -> None:
    mark = lab_paths.workspace / "outlived-pct"
    mark.unlink(missing_ok=True)
    go = lab_paths.workspace / "go"
    go.unlink(missing_ok=True)
    job = "until [ -e /workspace/go ]; do sleep 0.05; done; echo done > /workspace/outlived-pct"
    script = f"setsid sh -c '{job}' </dev/null >/dev/null 2>&1 &"
    assert inside(lab.endpoint, ["sh", "-c", script]).returncode == 0
    assert not mark.exists()
    go.touch()
    end = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
