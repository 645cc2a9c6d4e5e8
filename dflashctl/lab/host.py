"""The lab's host: the program that `lab up` starts and that everything in the lab descends from.

It enters new user, mount, pid, uts and ipc namespaces; its child there is pid 1, builds the host's view of
the file system, starts the GPU driver, the ssh server and container 200, and takes in orphans. When pid 1
goes, by whatever way, the kernel ends all that it ever started.

stdin: one line of JSON (HostPlan); then, once the laptop has written down where the lab is, a line `go`.
End of file instead of it means that `lab up` is gone, and ends the lab. stdout: JSON lines to `lab up`.
stderr: the log.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from dflashctl.agent.processes import proc
from dflashctl.lab import container, keys, layout, ns, rootfs, sshd
from dflashctl.lab.fds import read_line
from dflashctl.lab.layout import HostPlan

DESCRIPTORS = 8192


def main() -> int:
    """Stage 0, still outside: keys, the listening socket, the namespaces, pid 1."""
    try:
        plan = HostPlan(**json.loads(read_line(0)))
        keys.make_keys(Path(plan.ssh_dir))
        service = sshd.load_service(Path(plan.ssh_dir), plan.home, plan.environment)
        listener = sshd.listen()
        ns.enter()
        first = os.fork() == 0
    except OSError as error:
        _tell(refusal(error))
        return 1
    if first:
        _first_process(plan, service, listener)
    return 0


def refusal(error: OSError) -> dict[str, Any]:
    """A failed step as `lab up` gets it; refused.py turns it into advice."""
    stage = error.stage if isinstance(error, ns.StageError) else "files"
    return {"stage": stage, "errno": error.errno, "error": str(error)}


def _first_process(plan: HostPlan, service: sshd.Service, listener: socket.socket) -> NoReturn:
    code = 1
    try:
        _tell(proc.as_json(container.identity_outside()))
        # Who has the log locked is the lab's host, whatever became of its record (folder.host_of).
        fcntl.lockf(2, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.setsid()
        os.umask(0o022)
        ns.set_process_name("lab-host")
        ns.set_hostname(layout.NODE)
        rootfs.build(plan.root, rootfs.from_json(plan.steps))
        code = _run(service, listener)
    except OSError as error:
        _log(traceback.format_exc())
        _tell(refusal(error))
    except container.ContainerError as error:
        _log(str(error))
        _tell({"stage": error.stage, "errno": error.errno, "error": str(error)})
    except BaseException as error:
        _log(traceback.format_exc())
        _tell({"stage": "start", "errno": 0, "error": repr(error)})
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def _run(service: sshd.Service, listener: socket.socket) -> int:
    """Start what a host runs, say so, and stay until one of the two servers or `lab up` is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    servers = {
        _spawn("gpu-driver", _serve_gpus): "the GPU driver",
        _spawn("sshd", lambda: _serve_ssh(listener, service)): "the ssh server",
    }
    port = listener.getsockname()[1]
    listener.close()
    container.start(layout.PCT_STATE, layout.CONTAINER)
    _tell({"ready": True, "port": port})
    if read_line(0) != b"go\n":
        _log("lab up went away before it was done")
        return 1
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    while True:
        got = signal.sigwait({signal.SIGCHLD, signal.SIGTERM})
        if got == signal.SIGTERM:
            return 0
        for pid in _reap():
            if pid in servers:
                _log(f"{servers[pid]} ended: so does the lab")
                return 1


def _reap() -> list[int]:
    """Take away every ended child, adopted ones too."""
    gone: list[int] = []
    try:
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return gone
            gone.append(pid)
    except ChildProcessError:
        return gone


def _spawn(name: str, work: Callable[[], object]) -> int:
    """A child that does `work`, with nothing on stdin and its output in the log."""
    pid = os.fork()
    if pid:
        return pid
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        ns.reset_signals()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a reader that goes away must not end a server
        ns.set_process_name(name)
        work()
    except BaseException:
        _log(traceback.format_exc())
    finally:
        os._exit(1)


def _serve_gpus() -> None:
    from dflashctl.lab.gpu import driver

    driver.serve(Path(layout.GPU_STATE))


def _serve_ssh(listener: socket.socket, service: sshd.Service) -> None:
    # Each channel takes three descriptors, and the usual soft limit is 1024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, DESCRIPTORS), most))
    sshd.serve(listener, service)


def _tell(message: dict[str, Any]) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:  # nobody listens any more; stdin will say so
        pass


def _log(text: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    os.write(2, f"{stamp} {text.rstrip()}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
