"""`lab up`, `lab down`, `lab status`: the laptop's side of the lab's life."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.agent import proc
from dflashctl.errors import DflashError, Locked, Unreachable, UsageError
from dflashctl.lab import layout, refused
from dflashctl.lab.layout import HostPlan
from dflashctl.lab.state import (
    LabEndpoint,
    LabPaths,
    Record,
    environment_of_runs,
    lab_dir,
    python_of_the_lab,
    read_record,
)

START_DEADLINE_S = 30.0
ANSWER_DEADLINE_S = 10.0
KILL_DEADLINE_S = 20.0
LOCK_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Up:
    """What `lab up` found or made."""

    record: Record
    already: bool
    cleaned: bool  # something of an earlier lab was in the way
    seconds: float


def up() -> Up:
    """Bring the lab up, or find it up. Raises UsageError with the reason when the machine refuses."""
    began = time.monotonic()
    refused.check_platform()
    paths = LabPaths(lab_dir())
    with _locked(paths, create=True):
        found = read_record(paths)
        if found is not None and found.alive():
            if answers(found.endpoint, ANSWER_DEADLINE_S):
                return Up(found, True, False, time.monotonic() - began)
            _end(found)
        cleaned = _clean(paths)
        try:
            record = _start(paths)
        except OSError as error:
            _clean(paths)
            raise _disk_trouble(paths, error) from None
        except BaseException:
            _clean(paths)
            raise
        return Up(record, False, cleaned, time.monotonic() - began)


def down(*, keep: bool = False) -> bool:
    """End the lab and remove everything of it (`keep`: but the container's disk). False: there was nothing."""
    paths = LabPaths(lab_dir())
    if not paths.root.exists():
        return False
    with _locked(paths, create=False):
        found = read_record(paths)
        if found is not None and found.alive():
            _end(found)
        was_there = _clean(paths, disks=not keep) or found is not None
        if not keep:
            _remove_tree(paths.root)
    return was_there


@dataclass(frozen=True)
class Status:
    """What is there now. `word`: up, down, or a half-dead lab's state."""

    word: str
    record: Record | None  # of a lab that is up
    folder: str
    container_running: bool
    gpus: int


def status() -> Status:
    """Look; change nothing."""
    paths = LabPaths(lab_dir())
    found = read_record(paths)
    if found is None or not found.alive():
        word = (
            "down"
            if not paths.root.exists()
            else "down (an earlier lab left its files: `lab up` or `lab down` cleans)"
        )
        return Status(word, None, str(paths.root), False, 0)
    word = "up" if answers(found.endpoint, ANSWER_DEADLINE_S) else "half dead: its ssh server does not answer"
    devices = paths.gpu / "dev"
    gpus = sum(path.name[6:].isdigit() for path in devices.iterdir()) if devices.is_dir() else 0
    return Status(word, found, str(paths.root), _container_runs(paths, found), gpus)


def _container_runs(paths: LabPaths, record: Record) -> bool:
    """Whether container 200's first process lives. It is recorded as the lab's host counts pids, so it is looked
    for among the processes below the host's first one by its start time."""
    try:
        start = int((paths.pct / "ns" / f"{layout.CONTAINER}.init").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return False
    processes = proc.table()
    return any(
        processes[pid].start == start and not processes[pid].dead
        for pid in proc.descendants([record.pid], processes)
    )


def ssh_argv(endpoint: LabEndpoint) -> list[str]:
    """OpenSSH's command line to the lab's host, independent of the person's own configuration."""
    options = [f"UserKnownHostsFile={endpoint.known_hosts}", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes"]
    return [
        *("ssh", "-F", "none", "-i", endpoint.key, "-p", str(endpoint.port)),
        *(word for option in options for word in ("-o", option)),
        f"{endpoint.user}@{endpoint.host}",
    ]


def answers(endpoint: LabEndpoint, deadline_s: float) -> bool:
    """Whether an ssh server greets us at the endpoint."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=deadline_s) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


# --- up -------------------------------------------------------------------------------------------------------


def _start(paths: LabPaths) -> Record:
    python = python_of_the_lab()
    plan = _write_state(paths, python)
    package_parent = str(Path(__file__).parents[2])
    with open(paths.log, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dflashctl.lab.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env=_program_environment(package_parent, python),
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    # Closing stdin without a word ends the lab: whatever happens here, nothing half-done stays.
    with process.stdin, process.stdout:
        process.stdin.write(plan.to_line())
        process.stdin.flush()
        told = _await_ready(process, paths)
        endpoint = _endpoint(paths, python, told["port"])
        _write_known_hosts(paths, endpoint)
        found = proc.read_process(told["pid"])
        if found is None or not answers(endpoint, ANSWER_DEADLINE_S):
            raise Unreachable(
                "the lab started and does not answer", where=str(paths.log), next="dflashctl lab up"
            )
        record = Record(endpoint, found.pid, found.start, proc.boot_id(), time.time())
        _write_atomically(paths.record, layout.to_text(record.to_json()))
        process.stdin.write(b"go\n")
        process.stdin.flush()
    process.wait(KILL_DEADLINE_S)  # the program that made pid 1 has gone; take its entry away
    return record


def _program_environment(package_parent: str, python: layout.Python) -> dict[str, str]:
    """Little: what a person has in their environment (tokens, too) is no business of the lab's."""
    env = {"PATH": layout.SEARCH_PATH, "LANG": "C.UTF-8", "PYTHONPATH": package_parent}
    if python.user_base:
        env["PYTHONUSERBASE"] = python.user_base
    if "LD_LIBRARY_PATH" in os.environ:  # some Pythons do not start without it
        env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return env


def _write_state(paths: LabPaths, python: layout.Python) -> HostPlan:
    """Write down what the lab's programs read, and return the host's plan."""
    from dflashctl.lab import gpu

    machine = layout.look_at_machine()
    package_dir = Path(__file__).parents[1]
    for folder in (paths.ssh, paths.host_root, paths.pct / "conf", paths.pct / "ns", paths.node / "bin"):
        folder.mkdir(parents=True, exist_ok=True)
    paths.workspace.mkdir(exist_ok=True)
    gpu.setup(paths.gpu, layout.GPU_COUNT)
    devices = [path.name for path in gpu.device_files(paths.gpu)]
    (paths.pct / "pct.json").write_text(layout.to_text(layout.pct_settings()))
    for vmid in (layout.CONTAINER, layout.STOPPED_CONTAINER):
        paths.disk(vmid).mkdir(parents=True, exist_ok=True)
        spec = layout.container_spec(vmid, machine, python, package_dir=str(package_dir), gpu_devices=devices)
        (paths.pct / "ns" / f"{vmid}.json").write_text(layout.to_text(spec))
        (paths.pct / "conf" / f"{vmid}.conf").write_text(layout.container_conf(vmid, devices))
        _write_etc(paths, f"ct{vmid}")
    _write_etc(paths, layout.NODE)
    wrapper = paths.node / "bin" / "pct"
    wrapper.write_text(layout.pct_wrapper(python.interpreter, str(package_dir.parent)))
    wrapper.chmod(0o755)
    shell = next(path for path in ("/bin/bash", "/bin/sh") if os.path.exists(path))
    return HostPlan(
        root=str(paths.host_root),
        steps=layout.to_json(
            layout.host_steps(
                machine, python, node_dir=str(paths.node), package_dir=str(package_dir), gpu_devices=devices
            )
        ),
        ssh_dir=str(paths.ssh),
        home=python.home,
        environment={
            "PATH": layout.SEARCH_PATH,
            "HOME": python.home,
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": shell,
            "LANG": "C.UTF-8",
        },
    )


def _write_etc(paths: LabPaths, hostname: str) -> None:
    folder = paths.node / "etc" / hostname
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hostname").write_text(f"{hostname}\n")
    (folder / "hosts").write_text(layout.hosts_file(hostname))


def _await_ready(process: subprocess.Popen[bytes], paths: LabPaths) -> dict[str, Any]:
    """What the host says while it starts, merged. Raises UsageError or Unreachable with its reason."""
    assert process.stdout is not None
    told: dict[str, Any] = {}
    end = time.monotonic() + START_DEADLINE_S
    text = b""
    while "ready" not in told or "pid" not in told:
        if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            raise Unreachable(f"the lab did not start in {START_DEADLINE_S:.0f} s", where=str(paths.log))
        part = os.read(process.stdout.fileno(), 65536)
        text += part
        *lines, text = text.split(b"\n")
        for line in lines:
            told |= json.loads(line)
        if "error" in told or not part:
            raise refused.explain(told, paths.log)
    return told


def _endpoint(paths: LabPaths, python: layout.Python, port: int) -> LabEndpoint:
    return LabEndpoint(
        host="127.0.0.1",
        port=port,
        user="root",
        key=str(paths.ssh / "id_ed25519"),
        known_hosts=str(paths.ssh / "known_hosts"),
        python=python.executable,
        home=python.home,
        env=environment_of_runs(python),
    )


def _write_known_hosts(paths: LabPaths, endpoint: LabEndpoint) -> None:
    """Pin the server's key, so that nobody else on this machine can pass for the lab."""
    kind, key = (paths.ssh / "host_ed25519.pub").read_text().split()[:2]
    _write_atomically(paths.ssh / "known_hosts", f"[{endpoint.host}]:{endpoint.port} {kind} {key}\n")


# --- down -----------------------------------------------------------------------------------------------------


def _end(record: Record) -> None:
    """Kill the host's first process, and with it everything in the lab, and wait until it is gone."""
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if not record.alive():  # looked at again with the process held fast
            return
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not select.select([handle], [], [], KILL_DEADLINE_S)[0]:
            raise DflashError(
                f"the lab (pid {record.pid}) does not end; something in it hangs in the kernel",
                next=f"look at it: ps -o pid,stat,wchan:30,args -g {record.pid}",
            )
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def _clean(paths: LabPaths, *, disks: bool = True) -> bool:
    """Remove a dead lab's files; with the containers' disks if `disks`. False: there were none."""
    kept = {paths.lock.name} | (set() if disks else {paths.node.name})
    found = [path for path in paths.root.iterdir() if path.name not in kept]
    for path in found:
        _remove_tree(path)
    if not disks and paths.node.exists():
        for path in paths.node.iterdir():
            if path.name not in ("disk", "workspace"):
                _remove_tree(path)
    return bool(found)


def _remove_tree(path: Path) -> None:
    """Remove it all, folders without permission too (they are ours)."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for folder, _, _ in os.walk(path, onerror=None):
        _open_up(Path(folder))

    def again(action: Any, name: str, error: BaseException) -> None:
        if isinstance(error, FileNotFoundError):
            return
        raise error

    shutil.rmtree(path, onerror=lambda action, name, info: again(action, name, info[1]))


def _open_up(folder: Path) -> None:
    mode = stat.S_IMODE(folder.lstat().st_mode)
    if mode & 0o700 != 0o700:
        folder.chmod(mode | 0o700)


# --- both -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(paths: LabPaths, *, create: bool) -> Iterator[None]:
    """One `lab up` or `lab down` at a time. The folder may vanish while we wait: it is made again (`create`)."""
    end = time.monotonic() + LOCK_DEADLINE_S
    while True:
        if create:
            _make_folder(paths.root)
        try:
            fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            if create:
                continue
            fd = -1
        if fd < 0:
            yield
            return
        try:
            _flock(fd, paths, end)
            if _is_file(fd, paths.lock):
                yield
                return
        finally:
            os.close(fd)


def _flock(fd: int, paths: LabPaths, end: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise Locked(
                    "another `dflashctl lab up` or `lab down` is at work on this lab",
                    where=str(paths.root),
                    next="wait for it, or end it",
                ) from None
            time.sleep(0.05)


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _make_folder(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.geteuid():
            raise UsageError(
                f"{root} belongs to somebody else", next="set DFLASHCTL_LAB_DIR to a folder of yours"
            )
        root.chmod(0o700)
    except OSError as error:
        raise UsageError(
            f"cannot make the lab's folder: {error.strerror}",
            where=str(root),
            next="set DFLASHCTL_LAB_DIR to a folder of yours",
        ) from None


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(text)
    os.replace(aside, path)


def _disk_trouble(paths: LabPaths, error: OSError) -> DflashError:
    return UsageError(
        f"cannot write the lab's files: {error.strerror or error}",
        where=str(error.filename or paths.root),
        next="make room, or set DFLASHCTL_LAB_DIR to a folder on another disk",
    )
