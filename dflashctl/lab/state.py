"""Where the lab keeps its state on the laptop, and how the rest of dflashctl finds a lab that is up."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflashctl.agent.processes import proc
from dflashctl.errors import Unreachable, UsageError
from dflashctl.lab import layout, python_view

CODE_ROOT = "/workspace/dflash"
WORKDIR = "/workspace"
STATE_DIR = "/workspace/.dflashctl"


def lab_dir() -> Path:
    """The lab's folder: DFLASHCTL_LAB_DIR, else `lab` in the person's state folder."""
    named = os.environ.get("DFLASHCTL_LAB_DIR")
    if named:
        return Path(named).absolute()
    import platformdirs

    return platformdirs.user_state_path("dflashctl") / "lab"


@dataclass(frozen=True)
class LabPaths:
    """The files of one lab, below its folder (mode 0700)."""

    root: Path

    @property
    def record(self) -> Path:
        """lab.json: where the lab is, while it is up."""
        return self.root / "lab.json"

    @property
    def lock(self) -> Path:
        """Held by `lab up` and `lab down` at work; it also marks the folder as a lab's."""
        return self.root / "lab.lock"

    @property
    def log(self) -> Path:
        """What the host's own programs had to say."""
        return self.root / "host.log"

    @property
    def ssh(self) -> Path:
        """Key pairs and known_hosts."""
        return self.root / "ssh"

    @property
    def host_root(self) -> Path:
        """The host's own disk."""
        return self.root / "host"

    @property
    def node(self) -> Path:
        """/var/lib/lab on the host."""
        return self.root / "node"

    @property
    def bin(self) -> Path:
        """Programs of the host."""
        return self.node / "bin"

    @property
    def etc(self) -> Path:
        """hostname and hosts of the host and the containers."""
        return self.node / "etc"

    @property
    def pct(self) -> Path:
        """State of `pct`: pct.json, conf/, ns/."""
        return self.node / "pct"

    @property
    def gpu(self) -> Path:
        """State of the simulated GPUs (dflashctl.lab.gpu.setup)."""
        return self.node / "gpu"

    @property
    def workspace(self) -> Path:
        """/workspace of container 200."""
        return self.node / "workspace"

    def disk(self, vmid: int) -> Path:
        """A container's disk."""
        return self.node / "disk" / str(vmid)


@dataclass(frozen=True)
class LabEndpoint:
    """How to reach a lab: the ssh server of its host, and the places inside its container."""

    host: str
    port: int
    user: str
    key: str
    known_hosts: str
    python: str
    home: str
    path: str = layout.SEARCH_PATH
    container: int = layout.CONTAINER
    code_root: str = CODE_ROOT
    workdir: str = WORKDIR
    log_dir: str = WORKDIR
    state_dir: str = STATE_DIR
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """lab.json: the endpoint, and the identity of the host's first process."""

    endpoint: LabEndpoint
    pid: int
    start: int  # clock ticks since boot
    boot_id: str
    pid_namespace: int  # that `pid` counts in
    started_at: float  # seconds since the epoch

    def is_elsewhere(self) -> bool:
        """Whether `pid` means nothing here: same boot, another pid namespace."""
        return proc.boot_id() == self.boot_id and proc.pid_namespace() != self.pid_namespace

    def alive(self) -> bool:
        """Whether exactly that process still runs: a pid that was given out again, or a reboot, is no lab."""
        found = proc.read_process(self.pid)
        return (
            found is not None
            and not found.dead
            and found.start == self.start
            and proc.boot_id() == self.boot_id
            and not self.is_elsewhere()
        )

    def to_json(self) -> dict[str, Any]:
        return {"version": 1, **asdict(self)}


def read_record(paths: LabPaths) -> Record | None:
    """lab.json, or None when there is none or it is no record of ours (half-written).

    Raises UsageError for that of a later dflashctl: its lab is no half-dead one that may be ended.
    """
    try:
        data = json.loads(paths.record.read_text())
        version = data.pop("version")
        if isinstance(version, int) and version > 1:
            raise UsageError(
                f"the lab in {paths.root} was brought up by a newer dflashctl",
                next="use that one, or set DFLASHCTL_LAB_DIR to a folder of its own",
            )
        return Record(**{**data, "endpoint": LabEndpoint(**data["endpoint"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def answers(endpoint: LabEndpoint, deadline_s: float) -> bool:
    """Whether an ssh server greets us at the endpoint."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=deadline_s) as connection:
            return connection.recv(4, socket.MSG_WAITALL) == b"SSH-"
    except OSError:
        return False


def live_record() -> Record | None:
    """The record of the lab that is up, if one is."""
    record = read_record(LabPaths(lab_dir()))
    return record if record is not None and record.alive() else None


def load_endpoint() -> LabEndpoint:
    """How to reach the lab that is up. Raises Unreachable when none is."""
    record = live_record()
    if record is None:
        raise Unreachable("the lab is not up", next="dflashctl lab up")
    return record.endpoint


def python_of_this_program() -> layout.Python:
    """The running Python as a lab shows it. Raises UsageError when no home is left for root."""
    facts = python_view.gather()
    folders = python_view.folders_to_show(facts)
    try:
        home = python_view.container_home(folders)
    except ValueError as error:
        raise UsageError(str(error), where="lab", next="use a Python that lives elsewhere") from None
    return layout.Python(
        facts.executable, facts.interpreter, tuple(folders), home, facts.user_base, facts.search
    )


def environment_of_runs(python: layout.Python) -> dict[str, str]:
    """What programs in the container get beside PATH, HOME and LANG: the hook that opens GPUs as CUDA
    would."""
    env = {"PYTHONPATH": ":".join((layout.HOOK, *python.search))}
    return env if python.user_base is None else env | {"PYTHONUSERBASE": python.user_base}


def lab_defaults() -> dict[str, Any]:
    """The fields of a Host with engine `lab`: of the lab that is up, else of one that `lab up` would make."""
    record = live_record()
    if record is not None:
        python, home, env = record.endpoint.python, record.endpoint.home, dict(record.endpoint.env)
    else:
        mine = python_of_this_program()
        python, home, env = mine.executable, mine.home, environment_of_runs(mine)
    return {
        "container": layout.CONTAINER,
        "python": python,
        "home": home,
        "path": layout.SEARCH_PATH,
        "code_root": CODE_ROOT,
        "workdir": WORKDIR,
        "log_dir": WORKDIR,
        "state_dir": STATE_DIR,
        "gpus": {"expect": layout.GPU_COUNT},
        "env": env,
    }
