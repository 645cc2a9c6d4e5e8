"""The running bed: start it, act on its host and in its containers, put it back between tests, end it.

What tests learn here comes from LXC, /proc and the simulated driver themselves, never through dflashctl, so
that the two can be compared."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflashctl.lab.gpu import Box, change, device_files, setup

from . import pctstate
from .containers import Container, lxc_config, pve_config, standard
from .ground import (
    BEDS,
    CGROUPS,
    PREFIX,
    START_S,
    BedError,
    claim_ids,
    forget_cgroups,
    free_port,
    prepare,
    sweep,
    tree_of,
)
from .need import SSHD
from .plan import PATH, Layout, host_steps, sshd_config

REPOSITORY = Path(__file__).resolve().parents[3]


class Bed:
    """A host with its containers. `ids` maps a role (main, newer, bare, stopped) to its container id."""

    def __init__(self) -> None:
        self._lock, first = claim_ids()
        self.containers = {ct.role: ct for ct in standard()}
        self.ids = {role: first + ct.offset for role, ct in self.containers.items()}
        # Not below pytest's own folder: that is closed to the containers' ids.
        sweep(BEDS)
        self.layout = Layout(Path(tempfile.mkdtemp(prefix=PREFIX, dir=BEDS)))
        self.layout.top.chmod(0o711)
        self._owner = open(self.layout.top / "owner", "w")  # noqa: SIM115  held for the life of the bed
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        self.dir = self.layout.top
        self._init: subprocess.Popen[str] | None = None
        self.pid = 0
        self.port = 0
        try:
            prepare(self.layout)
            self._start_host()
            for role, ct in self.containers.items():
                if ct.starts:
                    self.start(role)
        except BaseException:
            self.close()
            raise

    # --- making it ---

    def _start_host(self) -> None:
        at = self.layout
        trees = [(ct, self.ids[role], tree_of(ct)) for role, ct in self.containers.items()]
        devices = device_files(at.gpu)
        cgroup_v1 = (CGROUPS / "memory").is_dir()
        for ct, vmid, _ in trees:
            forget_cgroups(vmid)
            (at.lxc / str(vmid)).mkdir(mode=0o711)
            config = lxc_config(ct, vmid, at.rootfs(vmid), devices, cgroup_v1)
            (at.lxc / str(vmid) / "config").write_text(config)
        self.port = free_port()
        pctstate.write(
            at, {self.ids[r]: pve_config(c, self.ids[r], at.shared) for r, c in self.containers.items()}
        )
        (at.ssh / "sshd_config").write_text(sshd_config(at, self.port))
        driver_env = {"PATH": PATH, "PYTHONPATH": str(REPOSITORY)}
        plan = {
            "steps": host_steps(at, trees, devices),
            "hostname": pctstate.NODE,
            "hostname_file": "/proc/sys/kernel/hostname",
            "servers": [
                {
                    "argv": [sys.executable, "-m", "dflashctl.lab.gpu.driver", str(at.gpu)],
                    "env": driver_env,
                    "log": str(at.top / "driver.log"),
                },
                {
                    "argv": [str(SSHD), "-D", "-e", "-f", str(at.ssh / "sshd_config")],
                    "env": {"PATH": PATH},
                    "log": str(at.top / "sshd.log"),
                },
            ],
        }
        self._launch(plan)
        self._await_port()
        (at.ssh / "known_hosts").write_text(self.known_hosts_line())

    def _launch(self, plan: dict[str, Any]) -> None:
        import json

        path = self.dir / "plan.json"
        path.write_text(json.dumps(plan, indent=1))
        argv = [
            "unshare",
            "--mount",
            "--pid",
            "--uts",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
            "--",
        ]
        argv += [sys.executable, "-I", str(Path(__file__).with_name("hostinit.py")), str(path)]
        log = open(self.dir / "host.log", "w")  # noqa: SIM115
        self._init = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        log.close()
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "ready\n":
            raise BedError("the bed's host did not start: " + (self.dir / "host.log").read_text()[-2000:])
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self.pid = int(children[0])

    def _await_port(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as s:
                    if s.recv(4) == b"SSH-":
                        return
            except OSError:
                pass
            if time.monotonic() > end:
                raise BedError("sshd does not answer: " + (self.dir / "sshd.log").read_text()[-2000:])
            time.sleep(0.02)

    # --- ssh ---

    @property
    def key(self) -> Path:
        """The private key that logs in as root and as the operator."""
        return self.layout.ssh / "user_key"

    @property
    def known_hosts(self) -> Path:
        return self.layout.ssh / "known_hosts"

    def known_hosts_line(self, port: int | None = None) -> str:
        """The bed's host key, as known_hosts has it for a connection through `port` (a proxy's)."""
        kind, key = (self.layout.ssh / "host_key.pub").read_text().split()[:2]
        return f"[127.0.0.1]:{port or self.port} {kind} {key}\n"

    def ssh(self, command: str, *, user: str = "root", input: bytes = b"", timeout: float = 90) -> Any:
        """OpenSSH's own client: a second opinion beside dflashctl's."""
        argv = ["ssh", "-F", "none", "-p", str(self.port), "-i", str(self.key), "-o", "IdentitiesOnly=yes"]
        argv += [
            "-o",
            f"UserKnownHostsFile={self.known_hosts}",
            "-o",
            "BatchMode=yes",
            f"{user}@127.0.0.1",
            command,
        ]
        return subprocess.run(argv, input=input, capture_output=True, timeout=timeout)

    def host_entry(self, role: str = "main", port: int | None = None, **more: Any) -> dict[str, Any]:
        """An entry of hosts.yaml for a container of this bed."""
        python = sys.executable if self.containers[role].laptop_python else "/usr/bin/python3"
        entry: dict[str, Any] = {
            "engine": "pct",
            "container": self.ids[role],
            "ssh": {
                "host": "127.0.0.1",
                "port": port or self.port,
                "user": "root",
                "identity_file": str(self.key),
                "known_hosts": str(self.known_hosts),
                "connect_timeout_s": 10,
            },
            "python": python,
            "code_root": "/workspace/code",
            "workdir": "/workspace",
            "log_dir": "/workspace",
            "state_dir": "/workspace/.dflashctl",
            "gpus": {"expect": 8},
        }
        return entry | more

    # --- on the host and inside, past dflashctl ---

    def on_host(
        self, argv: Sequence[str], *, input: bytes = b"", timeout: float = 90, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        """Run on the bed's host, in its namespaces, as root."""
        enter = ["nsenter", "-t", str(self.pid), "--mount", "--pid", "--uts", "--"]
        env = {"PATH": f"{self.layout.bin}:{PATH}", "HOME": str(self.layout.home), "LANG": "C.UTF-8"}
        done = subprocess.run([*enter, *argv], input=input, capture_output=True, timeout=timeout, env=env)
        if check and done.returncode != 0:
            raise BedError(f"{argv}: exit {done.returncode}: {done.stderr.decode(errors='replace')}")
        return done

    def inside(
        self, role: str, argv: Sequence[str], *, input: bytes = b"", timeout: float = 90, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        """Run in a container by lxc-attach itself."""
        attach = ["lxc-attach", "-P", str(self.layout.lxc), "-n", str(self.ids[role]), "--clear-env", "--"]
        return self.on_host([*attach, *argv], input=input, timeout=timeout, check=check)

    def _lxc(self, program: str, role: str, *args: str, check: bool = True) -> None:
        self.on_host([program, "-P", str(self.layout.lxc), "-n", str(self.ids[role]), *args], check=check)

    def state(self, role: str) -> str:
        """STOPPED, RUNNING or FROZEN, as LXC sees it."""
        argv = ["lxc-info", "-P", str(self.layout.lxc), "-n", str(self.ids[role]), "-s", "-H"]
        return self.on_host(argv).stdout.decode().strip()

    def start(self, role: str) -> None:
        log = self.dir / f"lxc-{self.ids[role]}.log"
        argv = [
            "lxc-start",
            "-P",
            str(self.layout.lxc),
            "-n",
            str(self.ids[role]),
            "-o",
            str(log),
            "-l",
            "WARN",
        ]
        enter = ["nsenter", "-t", str(self.pid), "--mount", "--pid", "--uts", "--"]
        # No pipes: the container's monitor would hold them for its life.
        null = subprocess.DEVNULL
        done = subprocess.run([*enter, *argv], stdin=null, stdout=null, stderr=null, timeout=30)
        if done.returncode != 0:
            raise BedError(f"lxc-start {role}: " + (log.read_text()[-2000:] if log.exists() else "no log"))

    def stop(self, role: str) -> None:
        self._lxc("lxc-stop", role, "-k")

    def freeze(self, role: str) -> None:
        self._lxc("lxc-freeze", role)

    def thaw(self, role: str) -> None:
        self._lxc("lxc-unfreeze", role)

    def pct(self, **settings: Any) -> None:
        """Change the stand-in's settings until the next reset: `pct(startup_delay_s=0.7)` is as slow as on a
        real host, `pct(pve=7)` an older one."""
        pctstate.write_settings(self.layout, **settings)

    def gpus(self, how: Callable[[Box], None]) -> None:
        """Change the simulated GPUs: `bed.gpus(lambda box: setattr(box, "mode", "hang"))`."""
        change(self.layout.gpu, how)

    def gpu_memory(self) -> list[int]:
        """MiB in use on each GPU, as the host's nvidia-smi says."""
        argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return [int(line) for line in self.on_host(argv).stdout.split()]

    def gpu_holders(self) -> list[tuple[int, str]]:
        """(host pid, uuid) of every holder."""
        argv = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
        rows = self.on_host(argv, check=False).stdout.decode().splitlines()  # a lost GPU is named among them
        return [(int(pid), uuid) for pid, uuid in (row.split(", ") for row in rows if ", GPU-" in row)]

    # --- between tests, and the end ---

    def reset(self) -> None:
        """Put back what a test may have changed: GPUs healthy, containers running (or stopped), nobody in
        them, their work folders empty, nothing staged on the host."""
        setup(self.layout.gpu)
        self.pct()
        for role, ct in self.containers.items():
            self._reset(role, ct)
        clean = 'for d do rm -rf "$d"/* "$d"/.[!.]*; done'
        folders = (self.layout.home, self.layout.operator_home, self.layout.shared)
        self.on_host(["sh", "-c", clean, "sh", *map(str, folders)], check=False)
        (self.layout.ssh / "known_hosts").write_text(self.known_hosts_line())

    def _reset(self, role: str, ct: Container) -> None:
        state = self.state(role)
        if state == "FROZEN":
            self.thaw(role)
        if not ct.starts:
            if state != "STOPPED":
                self.stop(role)
            return
        if state == "STOPPED":
            self.start(role)
        # -1: everybody in this pid namespace except its first process and the asker.
        clean = "kill -9 -1; rm -rf /workspace/* /workspace/.[!.]* /root/dflash /tmp/* /srv/small/*"
        self.inside(role, ["sh", "-c", clean], check=False)

    def close(self) -> None:
        """End it all. Also after a failed start."""
        if self._init is not None:
            if self.pid:
                for role in self.containers:
                    # Thawed first: what is frozen does not take the signal that ends it.
                    for how in (("lxc-unfreeze",), ("lxc-stop", "-k")):
                        with contextlib.suppress(BedError, subprocess.TimeoutExpired):
                            self._lxc(how[0], role, *how[1:], check=False)
            assert self._init.stdin is not None and self._init.stdout is not None
            self._init.stdin.close()  # its first process ends, and with it everything else
            try:
                self._init.wait(10)
            except subprocess.TimeoutExpired:
                self._init.kill()
                self._init.wait(10)
            self._init.stdout.close()
            self._init = None
        try:
            for vmid in self.ids.values():
                forget_cgroups(vmid)
        except BedError:
            pass  # the next bed with these ids says it
        shutil.rmtree(self.dir, ignore_errors=True)
        self._owner.close()
        self._lock.close()


def sessions() -> Iterator[Bed]:
    """One bed for the life of a generator."""
    bed = Bed()
    try:
        yield bed
    finally:
        bed.close()
