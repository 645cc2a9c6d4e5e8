"""A place where rows can be run, and how a row is run there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

from pctkit.table import Done, Row, differences, fill

GROUP_SECONDS = 5.0
REPOSITORY = Path(__file__).resolve().parents[3]
DEFAULT_CONFIG = {
    200: "arch: amd64\nhostname: ct200\nostype: debian\nunprivileged: 1\n",
    201: "arch: amd64\nhostname: stopped\nostype: debian\nunprivileged: 1\n",
    202: "arch: amd64\nhostname: ct202\nostype: debian\n",
}


class Place:
    """`names` are what {ct} and the like stand for:

    ct, stopped, missing, priv   ids of a running, a stopped, no, and a privileged running container
    node, hostname               names of the host and of container ct
    host, above                  a scratch folder of the host, and the folder that it is in
    inside                       a scratch folder of the container
    home                         a folder that host and container both have; HOME
    lock, conf                   the container's lock file and the folder of configuration files
    freeze, thaw                 commands that freeze and thaw container ct
    """

    name: str
    names: dict[str, str]
    has: frozenset[str] = frozenset()  # what rows may need

    def prepare(self, row: Row) -> None:
        """Make the state before: default containers and configuration, empty scratch folders."""
        raise NotImplementedError

    def run(self, script: str, stdin: str = "", seconds: float = 60.0) -> Done:
        """Run a bash script on the host."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def why_not(self, row: Row) -> str:
        """Why a row is not run here; "" when it is."""
        return unfit(row, self.name, self.has)

    def judge(self, row: Row) -> list[str]:
        """Run a row and say how it differs from the table; empty when it does not."""
        row = row.at(self.name)
        self.prepare(row)
        try:
            for script in row.before:
                done = self.run(fill(script, self.names))
                if done.exit != 0:
                    return [f"before: {script}: exit {done.exit}, {done.stdout}{done.stderr}"]
            command = fill(row.command, self.names)
            found = differences(
                row.expected, self.run(command, fill(row.stdin, self.names), row.seconds), self.names
            )
            for check in row.after:
                done = self.run(fill(check.run, self.names))
                if done.stdout != fill(check.stdout, self.names):
                    found.append(
                        f"after: {check.run}: expected {check.stdout!r}, got {done.stdout!r} {done.stderr}"
                    )
            return found
        finally:
            for script in row.cleanup:
                self.run(fill(script, self.names))


def unfit(row: Row, place: str, has: frozenset[str]) -> str:
    """Why a row does not apply to a place that has these things; "" when it does."""
    lacking = [need for need in row.needs if need not in has]
    return row.skipped_at(place) or (f"this place has no {', '.join(lacking)}" if lacking else "")


class StandIn(Place):
    """Our own pct, over a state folder that is this place's. Subclasses make the containers."""

    has = frozenset({"own node", "stopped", "privileged", "freezer"})
    backend_running: tuple[int, ...] = (200, 202)

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state"
        self.scratch = root / "host" / "bat"
        self.home = root / "home"
        for folder in (self.state / "conf", self.state / "ns", self.state / "lock", root / "bin", self.home):
            folder.mkdir(parents=True)
        self.names = {
            "ct": "200",
            "stopped": "201",
            "missing": "999",
            "priv": "202",
            "node": "pve1",
            "hostname": "ct200",
            "host": str(self.scratch),
            "above": str(self.scratch.parent),
            "inside": "/root",
            "home": str(self.home),
            "lock": str(self.state / "lock" / "pve-config-200.lock"),
            "conf": str(self.state / "conf"),
        }
        self._write_program()

    def _write_program(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})"
        code += "; from dflashctl.lab.pct.cli import main; main()"
        program = self.root / "bin" / "pct"
        program.write_text(
            f"#!/bin/sh\nDFLASHCTL_PCT_STATE={shlex.quote(str(self.state))}\nexport DFLASHCTL_PCT_STATE\n"
            f'exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(code)} "$@"\n'
        )
        program.chmod(0o755)

    def environment(self) -> dict[str, str]:
        """What sshd would give a session of root."""
        return {
            "PATH": f"{self.root}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.home),
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
        }

    def prepare(self, row: Row) -> None:
        settings = {"version": 1, "node": "pve1", "pve": row.pve, "startup_delay_s": 0.0}
        settings["lock_dir"] = str(self.state / "lock")
        (self.state / "pct.json").write_text(json.dumps(settings))
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self._configure(DEFAULT_CONFIG)
        for vmid in self.backend_running:
            if vmid in row.containers:
                self.revive(vmid)
        self._configure({vmid: DEFAULT_CONFIG[vmid] for vmid in row.containers} | row.config)

    def _configure(self, texts: dict[int, str]) -> None:
        folder = self.state / "conf"
        for path in folder.iterdir():
            path.unlink()
        for vmid, text in texts.items():
            (folder / f"{vmid}.conf").write_text(text)

    def revive(self, vmid: int) -> None:
        """The container runs, is not frozen, and its scratch folder is empty."""
        raise NotImplementedError


def execute(
    script: str, stdin: bytes, seconds: float, env: Mapping[str, str], folder: str
) -> tuple[bytes, bytes, int]:
    """Run a bash script in a session of its own and return stdout, stderr and exit code (-1: killed at its
    deadline).

    Output goes to files, not pipes: a process that hangs in a frozen container must not keep us waiting.
    """
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            ["bash", "-c", script],
            stdin=given,
            stdout=out,
            stderr=err,
            env=dict(env),
            cwd=folder,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            _wait_for_group(process.pid, GROUP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = -1
        out.seek(0)
        err.seek(0)
        return out.read(), err.read(), code


def _wait_for_group(group: int, seconds: float) -> None:
    """Wait for the script's background processes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
