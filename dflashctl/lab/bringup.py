"""How `lab up` makes a lab: write down what its programs read, start the host's program, wait until it
answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflashctl.agent.processes import proc
from dflashctl.errors import Unreachable
from dflashctl.lab import ending, folder, layout, refused
from dflashctl.lab.fds import wait_readable
from dflashctl.lab.state import (
    LabEndpoint,
    LabPaths,
    Record,
    answers,
    environment_of_runs,
    python_of_this_program,
)

START_DEADLINE_S = 30.0
ANSWER_DEADLINE_S = 10.0
END_DEADLINE_S = 20.0

_PACKAGE = Path(__file__).parents[1]


def start(paths: LabPaths) -> Record:
    """Make the lab and return its record, which is then on disk. On any failure, Ctrl-C included, nothing
    of it is left running. Raises UsageError when the machine refuses, Unreachable, OSError (a full
    disk)."""
    python = python_of_this_program()
    plan = _write_state(paths, python)
    folder.trim_log(paths)
    process: subprocess.Popen[bytes] | None = None
    told: dict[str, Any] = {}
    try:
        # Popen cut short would leave a child that nobody knows of.
        with paths.log.open("ab") as log, _ctrl_c_waits():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dflashctl.lab.host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env=_environment_of_host(python),
                start_new_session=True,
                bufsize=0,
            )
        return _speak_with_host(process, plan, paths, python, told)
    except BaseException:
        if process is not None:
            _give_up(process, told)
        raise


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """A Ctrl-C that comes within is answered right after. Only a program's first thread ever gets one."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _speak_with_host(
    process: subprocess.Popen[bytes],
    plan: layout.HostPlan,
    paths: LabPaths,
    python: layout.Python,
    told: dict[str, Any],
) -> Record:
    """The conversation of host.py's first lines, from our side. What the host says is added to `told`."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it ended already; its last words say why
        process.stdin.write(plan.to_line())
    _await_ready(process.stdout.fileno(), told, paths)
    endpoint = _endpoint(paths, python, told["port"])
    _pin_host_key(paths, endpoint)
    identity = proc.as_identity(told)
    if identity is None or not answers(endpoint, ANSWER_DEADLINE_S):
        raise Unreachable("the lab started and does not answer", where=str(paths.log), next="read that log")
    record = Record(
        endpoint=endpoint,
        pid=identity[0],
        start=identity[1],
        boot_id=proc.boot_id(),
        pid_namespace=proc.pid_namespace() or 0,
        started_at=time.time(),
    )
    folder.write_atomically(paths.record, layout.to_text(record.to_json()))
    # From this line on the lab lives without us.
    process.stdin.write(b"go\n")
    process.stdin.close()
    process.stdout.close()
    process.wait(END_DEADLINE_S)
    return record


def _await_ready(fd: int, told: dict[str, Any], paths: LabPaths) -> None:
    end = time.monotonic() + START_DEADLINE_S
    text = b""
    while "ready" not in told or "pid" not in told:
        if not wait_readable(fd, max(0.0, end - time.monotonic())):
            raise Unreachable(f"the lab did not start in {START_DEADLINE_S:.0f} s", where=str(paths.log))
        part = os.read(fd, 65536)
        *lines, text = (text + part).split(b"\n")
        for line in lines:
            told |= json.loads(line)
        if "error" in told or not part:
            raise refused.explain(told, paths.log)


def _give_up(process: subprocess.Popen[bytes], told: dict[str, Any]) -> None:
    """End what was started. The host ends when its stdin does; its stdout ends when it has."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.kill()
    process.wait(END_DEADLINE_S)
    if not process.stdout.closed:
        end = time.monotonic() + END_DEADLINE_S
        while wait_readable(process.stdout.fileno(), max(0.0, end - time.monotonic())):
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                break
            for line in part.splitlines():
                with contextlib.suppress(ValueError):
                    told |= json.loads(line)
        process.stdout.close()
    # Its first process may be past reading its stdin (after `go`), or have only just let go of its stdout.
    identity = proc.as_identity(told)
    if identity is not None:
        ending.kill(identity, END_DEADLINE_S)


def _environment_of_host(python: layout.Python) -> dict[str, str]:
    """Little: what a person has in their environment (tokens, too) is no business of the lab's."""
    search = ":".join((str(_PACKAGE.parent), *python.search))
    env = {"PATH": layout.SEARCH_PATH, "LANG": "C.UTF-8", "PYTHONPATH": search}
    if python.user_base:
        env["PYTHONUSERBASE"] = python.user_base
    if "LD_LIBRARY_PATH" in os.environ:  # some Pythons do not start without it
        env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return env


def _write_state(paths: LabPaths, python: layout.Python) -> layout.HostPlan:
    """Write down what the lab's programs read, and return the host's plan."""
    from dflashctl.lab import gpu

    machine = layout.look_at_machine()
    for path in (
        paths.ssh,
        paths.host_root,
        paths.pct / "conf",
        paths.pct / "ns",
        paths.bin,
        paths.workspace,
    ):
        path.mkdir(parents=True, exist_ok=True)
    gpu.setup(paths.gpu, layout.GPU_COUNT)
    devices = [path.name for path in gpu.device_files(paths.gpu)]
    (paths.pct / "pct.json").write_text(layout.to_text(layout.pct_settings()))
    for vmid in (layout.CONTAINER, layout.STOPPED_CONTAINER):
        paths.disk(vmid).mkdir(parents=True, exist_ok=True)
        spec = layout.container_spec(vmid, machine, python, package_dir=str(_PACKAGE), gpu_devices=devices)
        (paths.pct / "ns" / f"{vmid}.json").write_text(layout.to_text(spec))
        (paths.pct / "conf" / f"{vmid}.conf").write_text(layout.container_conf(vmid, devices))
    for hostname in (layout.NODE, *(f"ct{v}" for v in (layout.CONTAINER, layout.STOPPED_CONTAINER))):
        (paths.etc / hostname).mkdir(parents=True, exist_ok=True)
        (paths.etc / hostname / "hostname").write_text(f"{hostname}\n")
        (paths.etc / hostname / "hosts").write_text(layout.hosts_file(hostname))
    for program, module in (("pct", "cli"), ("pveversion", "pveversion")):
        wrapper = paths.bin / program
        wrapper.write_text(layout.pct_wrapper(python.interpreter, str(_PACKAGE.parent), module))
        wrapper.chmod(0o755)
    steps = layout.host_steps(
        machine, python, node_dir=str(paths.node), package_dir=str(_PACKAGE), gpu_devices=devices
    )
    return layout.HostPlan(
        root=str(paths.host_root),
        steps=layout.to_json(steps),
        ssh_dir=str(paths.ssh),
        home=python.home,
        environment=layout.session_environment(python.home),
    )


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


def _pin_host_key(paths: LabPaths, endpoint: LabEndpoint) -> None:
    """So that nobody else on this machine can pass for the lab."""
    kind, key = (paths.ssh / "host_ed25519.pub").read_text().split()[:2]
    folder.write_atomically(paths.ssh / "known_hosts", f"[{endpoint.host}]:{endpoint.port} {kind} {key}\n")
