"""Start and stop a container of the lab: nested user, mount, pid, uts and ipc namespaces.

`pct` calls this on the lab's host. A container is described by `<state>/ns/<vmid>.json`
(layout.container_spec); while it runs, `<state>/ns/<vmid>.init` holds "pid start": its first process as the
host sees it. When that process goes, the kernel ends all others of the container. Standard library only;
works under `python -I -S`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from dflashctl.agent.processes import proc
from dflashctl.agent.processes.signals import send_signal
from dflashctl.lab import ending, ns, rootfs
from dflashctl.lab.fds import wait_readable

START_DEADLINE_S = 20.0
KILL_DEADLINE_S = 10.0
INIT = "/sbin/init"
"""init.py, as the container sees it."""

_INIT_SIGNALS = {signal.SIGTERM, signal.SIGPWR, signal.SIGINT, signal.SIGCHLD}


class ContainerError(RuntimeError):
    """A container could not be started or stopped; the text says why. `stage` and `errno` of a step that the
    kernel refused, as in ns.StageError."""

    def __init__(self, text: str, stage: str = "container", errno: int = 0) -> None:
        super().__init__(text)
        self.stage = stage
        self.errno = errno


def start(state_dir: Path | str, vmid: int) -> int:
    """Start the container and return its first process's pid, as the caller's pid namespace counts it.

    To be called from a single-threaded process. Raises ContainerError when it runs already or cannot start;
    then nothing of it is left running.
    """
    state = Path(state_dir)
    if init_pid(state, vmid) is not None:
        raise ContainerError(f"CT {vmid} already running")
    spec = read_spec(state, vmid)
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        _middle(spec, write_end)
    os.close(write_end)
    try:
        told = _read_until_closed(read_end, START_DEADLINE_S)
    finally:
        os.close(read_end)
        os.waitpid(middle, 0)
    answers = [json.loads(line) for line in told.splitlines() if line]
    merged: dict[str, Any] = {k: v for answer in answers for k, v in answer.items()}
    identity = proc.as_identity(merged)
    if "error" in merged or not merged.get("ready") or identity is None:
        if identity is not None:
            ending.kill(identity, KILL_DEADLINE_S)
        why = merged.get("error", "its first process ended at once")
        raise ContainerError(
            f"CT {vmid} cannot start: {why}", merged.get("stage", "container"), merged.get("errno", 0)
        )
    _write_atomically(_init_file(state, vmid), f"{identity[0]} {identity[1]}\n")
    return identity[0]


def stop(state_dir: Path | str, vmid: int, timeout_s: float, *, force: bool = True) -> bool:
    """Ask the container's first process to end, wait up to timeout_s, then kill (`force`). With timeout_s 0
    it is killed at once. Returns whether it is gone; ContainerError if it outlives SIGKILL."""
    state = Path(state_dir)
    identity = _recorded(state, vmid)
    if identity is not None and proc.living(identity) is not None:
        ended = False
        if timeout_s > 0:
            send_signal(identity, signal.SIGTERM)
            ended = ending.gone(identity, timeout_s)
        if not ended and not force:
            return False
        if not ended and not ending.kill(identity, KILL_DEADLINE_S):
            raise ContainerError(f"CT {vmid}: pid {identity[0]} does not end after SIGKILL")
    _init_file(state, vmid).unlink(missing_ok=True)
    return True


def init_pid(state_dir: Path | str, vmid: int) -> int | None:
    """The container's first process if it is alive: the recorded pid still has the recorded start time."""
    found = proc.living(_recorded(Path(state_dir), vmid))
    return None if found is None else found.pid


def read_spec(state: Path, vmid: int) -> dict[str, Any]:
    """`<state>/ns/<vmid>.json`. ContainerError when it is missing or not for namespaces."""
    path = state / "ns" / f"{vmid}.json"
    try:
        spec: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ContainerError(f"CT {vmid}: cannot read {path}: {error}") from None
    if spec.get("backend") != "userns":
        raise ContainerError(f"CT {vmid}: backend {spec.get('backend')!r} is not one of namespaces")
    return spec


def _middle(spec: dict[str, Any], report: int) -> NoReturn:
    """Enter the namespaces, make their first process, go: the host's init inherits it."""
    code = 1
    try:
        os.setsid()
        ns.reset_signals()
        ns.close_all_but(report)
        os.umask(0o022)
        devnull = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(devnull, fd)
        os.close(devnull)
        ns.enter()
        if os.fork() == 0:
            _become_init(spec, report)
        code = 0
    except BaseException as error:
        _tell(report, _refusal(error))
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def identity_outside() -> proc.Identity:
    """Who a first process is where it was started: while the old /proc is still in sight, which says so."""
    found = proc.read_process(int(Path("/proc/self").readlink().name))
    assert found is not None  # it is this process
    return found.identity


def _become_init(spec: dict[str, Any], report: int) -> NoReturn:
    try:
        _tell(report, proc.as_json(identity_outside()))
        ns.set_hostname(spec["hostname"])
        rootfs.build(spec["rootfs"], rootfs.from_json(spec["steps"]))
        # Blocked before the exec, or a signal that comes early would be lost: pid 1 has no default actions.
        signal.pthread_sigmask(signal.SIG_BLOCK, _INIT_SIGNALS)
        os.set_inheritable(report, False)
        _tell(report, {"ready": True})
        python = spec["init_python"]
        os.execve(python, [python, "-I", "-S", INIT], {"PATH": "/sbin:/bin", "container": "lxc"})
    except BaseException as error:
        _tell(report, _refusal(error))
    finally:
        os._exit(1)
    raise AssertionError("unreachable")


def _tell(fd: int, message: dict[str, Any]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


def _refusal(error: BaseException) -> dict[str, Any]:
    number = error.errno if isinstance(error, OSError) else None
    return {"error": str(error), "stage": getattr(error, "stage", "container"), "errno": number or 0}


def _read_until_closed(fd: int, deadline_s: float) -> bytes:
    end = time.monotonic() + deadline_s
    parts: list[bytes] = []
    while wait_readable(fd, max(0.0, end - time.monotonic())):
        part = os.read(fd, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b"".join([*parts, json.dumps({"error": f"no answer in {deadline_s:.0f} s"}).encode(), b"\n"])


def _init_file(state: Path, vmid: int) -> Path:
    return state / "ns" / f"{vmid}.init"


def _recorded(state: Path, vmid: int) -> proc.Identity | None:
    try:
        pid, start = (int(word) for word in _init_file(state, vmid).read_text().split())
    except (OSError, ValueError):
        return None
    return (pid, start) if pid > 1 else None


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(text)
    aside.replace(path)


if __name__ == "__main__":
    print(start(sys.argv[1], int(sys.argv[2])))
