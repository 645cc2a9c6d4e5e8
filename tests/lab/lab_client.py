"""Ways into the lab for its tests: OpenSSH's client, paramiko, and a container of the lab."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fast_cli
import paramiko

from dflashctl.lab import lifecycle
from dflashctl.lab.layout import PCT_STATE
from dflashctl.lab.state import LabEndpoint

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 120.0


def ssh(endpoint: LabEndpoint, command: str, *options: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command with OpenSSH's client."""
    assert shutil.which("ssh"), "these tests need OpenSSH's client (Debian: openssh-client)"
    *argv, target = lifecycle.ssh_argv(endpoint)
    how = {"capture_output": True, "timeout": DEADLINE_S, "check": False} | how
    if "input" not in how:
        how.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([*argv, *options, target, command], **how)


def connect(endpoint: LabEndpoint, **change: Any) -> paramiko.SSHClient:
    """A paramiko client that trusts the pinned host key only."""
    client = paramiko.SSHClient()
    client.load_host_keys(endpoint.known_hosts)
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    how = {
        "port": endpoint.port,
        "username": endpoint.user,
        "key_filename": endpoint.key,
        "allow_agent": False,
        "look_for_keys": False,
        "timeout": DEADLINE_S,
    }
    client.connect(endpoint.host, **(how | change))
    return client


def inside(endpoint: LabEndpoint, argv: Sequence[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
    """Run argv in container 200, by `pct exec` on the lab's host."""
    return ssh(endpoint, shlex.join(["pct", "exec", "200", "--", *argv]), **how)


def enter(
    endpoint: LabEndpoint, script: str, vmid: int = 200, **how: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a shell script in a container, by its namespaces alone."""
    return ssh(endpoint, enter_command(script, vmid), **how)


def enter_command(script: str, vmid: int = 200) -> str:
    namespaces = "--user --preserve-credentials --mount --pid --uts --ipc --root --wd"
    return (
        f"read pid start < {PCT_STATE}/ns/{vmid}.init && exec nsenter -t $pid {namespaces}"
        f" sh -c {shlex.quote(script)}"
    )


def on_host(endpoint: LabEndpoint, code: str) -> subprocess.CompletedProcess[bytes]:
    """Run Python on the lab's host as `pct` does it: standard library and the package alone."""
    parent = str(Path(lifecycle.__file__).parents[2])
    setup = (
        f"import sys; sys.path.append({parent!r})\nfrom dflashctl.lab import container\nS = {PCT_STATE!r}\n"
    )
    return ssh(endpoint, shlex.join(["python3", "-I", "-S", "-c", setup + code]))


def cli(
    *words: str, lab_dir: Path, prefix: Sequence[str] = (), **how: Any
) -> subprocess.CompletedProcess[str]:
    """dflashctl in a process of its own, with a lab of its own."""
    if not prefix and set(how) <= {"cwd", "env"}:
        where = {"cwd": Path.cwd(), "env": cli_environment(lab_dir)} | how
        return fast_cli.run(*words, timeout=DEADLINE_S, **where)
    return subprocess.run(
        [*prefix, *cli_argv(*words)],
        text=True,
        **(
            {"env": cli_environment(lab_dir), "capture_output": True, "timeout": DEADLINE_S, "check": False}
            | how
        ),
    )


def cli_argv(*words: str) -> list[str]:
    code = "import sys; from dflashctl.cli.main import main; main(sys.argv[1:])"
    return [sys.executable, "-P", "-c", code, *words]


def cli_environment(lab_dir: Path) -> dict[str, str]:
    return os.environ | {"DFLASHCTL_LAB_DIR": str(lab_dir), "PYTHONPATH": str(REPOSITORY)}
