"""`lab up`, `lab down`, `lab status`: the order of things. What each step does is in bringup.py and
folder.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from dflashctl.agent.processes import kin, proc
from dflashctl.agent.records.runfolder import list_runs
from dflashctl.errors import DflashError, UsageError
from dflashctl.lab import bringup, ending, folder, layout, refused
from dflashctl.lab.state import (
    STATE_DIR,
    WORKDIR,
    LabEndpoint,
    LabPaths,
    Record,
    answers,
    lab_dir,
    read_record,
)

ANSWER_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Up:
    """What `lab up` found or made."""

    record: Record
    already: bool
    cleaned: bool  # something of an earlier lab was in the way
    seconds: float
    started_container: bool = False  # of a lab that was up with its container stopped


@dataclass(frozen=True)
class Status:
    """What is there now. `word`: up, down, or a half-dead lab's state."""

    word: str
    record: Record | None  # of a lab that is up
    folder: str
    container_running: bool
    gpus: int


def up(start_container: Callable[[], None] | None = None) -> Up:
    """Bring the lab up, or find it up; a half-dead one is ended and made anew, with the disks that it had.
    `start_container` is called for a lab that is up with its container stopped, still under the folder's
    lock: no `lab down` comes in between.

    Raises UsageError with the reason when the machine refuses.
    """
    began = time.monotonic()
    refused.check_platform()
    paths = LabPaths(lab_dir())
    with folder.locked(paths, create=True):
        found = read_record(paths)
        if found is not None and _lives(found) and answers(found.endpoint, ANSWER_DEADLINE_S):
            stopped = not _container_runs(paths, found)
            if stopped and start_container is not None:
                start_container()
            started = stopped and start_container is not None
            return Up(found, True, False, time.monotonic() - began, started)
        _end(paths, found)
        cleaned = folder.clean(paths)
        try:
            record = bringup.start(paths)
        except OSError as error:
            folder.clean(paths)
            raise folder.trouble(paths, error) from None
        except BaseException:
            folder.clean(paths)
            raise
        return Up(record, False, cleaned, time.monotonic() - began)


def down(*, keep: bool = False) -> bool:
    """End the lab and remove everything of it (`keep`: all but the containers' disks). False: nothing was
    there."""
    paths = LabPaths(lab_dir())
    with folder.locked(paths, create=False) as there:
        if not there:
            return False
        found = read_record(paths)
        if found is not None:
            _lives(found)
        _end(paths, found)
        was_up = folder.clean(paths)
        if not keep:
            was_up = was_up or paths.node.exists()
            folder.remove(paths)
        return was_up


def open_runs() -> list[str]:
    """Tags of the lab's runs that have begun and have no end on record, newest first. Read from its disk.
    Those of an earlier start of the container were lost then, and do not end with the lab."""
    paths = LabPaths(lab_dir())
    inside = PurePosixPath(STATE_DIR).relative_to(WORKDIR)
    started = _container_start(paths)
    found = []
    for run in list_runs(str(paths.workspace / inside)):
        record = run.record().value or {}
        lost = record.get("init_start", started) != started
        if run.has("supervisor.json") and not run.has("exit.json") and not lost:
            found.append(str(record.get("tag") or run.id))
    return found


def status() -> Status:
    """Look; change nothing."""
    paths = LabPaths(lab_dir())
    found = read_record(paths)
    if found is None:
        word = "down" if folder.host_of(paths) is None else "half dead: its record is gone"
        return Status(word, None, str(paths.root), False, 0)
    if not found.alive():
        word = f"down: it ended without `lab down` (its log: {paths.log})"
        return Status(word, None, str(paths.root), False, 0)
    word = "up" if answers(found.endpoint, ANSWER_DEADLINE_S) else "half dead: its ssh server does not answer"
    devices = paths.gpu / "dev"
    gpus = sum(path.name[6:].isdigit() for path in devices.iterdir()) if devices.is_dir() else 0
    return Status(word, found, str(paths.root), _container_runs(paths, found), gpus)


def ssh_argv(endpoint: LabEndpoint) -> list[str]:
    """OpenSSH's command line to the lab's host, independent of the person's own configuration."""
    options = [
        f"IdentityFile={_ssh_path(endpoint.key)}",  # -i cannot take every path
        f"UserKnownHostsFile={_ssh_path(endpoint.known_hosts)}",
        "IdentitiesOnly=yes",
        "StrictHostKeyChecking=yes",
    ]
    return [
        *("ssh", "-F", "none", "-p", str(endpoint.port)),
        *(word for option in options for word in ("-o", option)),
        f"{endpoint.user}@{endpoint.host}",
    ]


def _ssh_path(path: str) -> str:
    """A path as a value in OpenSSH's configuration: words are split, and % starts a token (ssh_config(5))."""
    escaped = path.replace("%", "%%")
    if not any(char in escaped for char in " \t'\"\\"):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _lives(record: Record) -> bool:
    """Whether the lab's first process is there. A lab of another pid namespace (up inside a container that
    shares this folder) cannot be seen from here, so nothing is done to it."""
    if record.is_elsewhere() and answers(record.endpoint, ANSWER_DEADLINE_S):
        raise UsageError(
            "this lab was brought up inside another pid namespace (a container that shares its folder)",
            next="use it and end it there, or set DFLASHCTL_LAB_DIR to a folder of its own",
        )
    return record.alive()


def _end(paths: LabPaths, record: Record | None) -> None:
    """End the lab's host: the recorded one, and one whose record is gone."""
    recorded = (record.pid, record.start) if record is not None and record.alive() else None
    for identity in {recorded, folder.host_of(paths)} - {None}:
        if identity is not None and not ending.kill(identity, bringup.END_DEADLINE_S):
            raise DflashError(
                f"the lab (pid {identity[0]}) does not end: a process in it hangs in the kernel",
                next=f"look at it: ps -o pid,stat,wchan:30,args --ppid {identity[0]}",
            )


def _container_runs(paths: LabPaths, record: Record) -> bool:
    """Whether container 200's first process lives. It is recorded as the lab's host counts pids, so it is
    looked for among the processes below the host's first one by its start time."""
    start = _container_start(paths)
    processes = proc.table()
    return start is not None and any(
        processes[pid].start == start and not processes[pid].dead
        for pid in kin.descendants([record.pid], processes)
    )


def _container_start(paths: LabPaths) -> int | None:
    """Start ticks of container 200's first process; None where it was stopped, or never started."""
    try:
        return int((paths.pct / "ns" / f"{layout.CONTAINER}.init").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
