"""Who holds each GPU: a run, another process of the container, another container, the host. Pure.

The driver's pids are matched to the runs' families by (pid namespace, innermost pid, start ticks): the inode
of a pid namespace is the same number on the host and inside, and so is the start in ticks since boot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflashctl.gpus.smi import App

Kind = Literal["run", "container", "other_container", "host", "unknown"]
CONTAINER = re.compile(r"/lxc(?:\.payload)?[./](\d{3,9})(?:[/.]|$)", re.MULTILINE)

SLICE = re.compile(r"^MIG-(GPU-[^/]+)/\d+/\d+$")
"""A part of a GPU (MIG) as older drivers write it; newer ones name it by a UUID of its own."""


@dataclass(frozen=True)
class Holder:
    """A process that has a GPU. `pid` counts as the host does, `inner_pid` as the process's own namespace."""

    kind: Kind
    pid: int
    memory_mib: int | None
    name: str
    inner_pid: int | None = None
    run_id: str | None = None
    tag: str | None = None
    container: str | None = None
    user: str | None = None
    command: str | None = None
    since: float | None = None
    """Start of the process, seconds since the epoch."""
    state: str | None = None

    @property
    def label(self) -> str:
        """For the table's last column."""
        what = self.command or self.name
        if self.kind == "run":
            return f"{self.tag or self.run_id} (pid {self.inner_pid})"
        if self.kind == "container":
            return f"container process, pid {self.inner_pid}: {what}"
        if self.kind == "other_container":
            where = f"container {self.container}" if self.container else "another container"
            return f"{where}, pid {self.pid} on the host: {what}"
        if self.kind == "host":
            return f"host process, pid {self.pid}, user {self.user}: {what}"
        return f"unknown process, pid {self.pid or 'hidden'}: {what}"


def holders(
    apps: tuple[App, ...],
    host_facts: Mapping[str, Any],
    inside_facts: Mapping[str, Any],
    *,
    container: int | None = None,
) -> dict[str, tuple[Holder, ...]]:
    """GPU UUID -> its holders, in nvidia-smi's order."""
    members = {
        (member.get("pidns"), member.get("nspid"), member.get("start")): run
        for run in inside_facts.get("runs", ())
        for member in run.get("family", ())
    }
    found: dict[str, tuple[Holder, ...]] = {}
    for app in apps:
        process = host_facts.get("processes", {}).get(str(app.pid))
        holder = name_holder(app, process, members, host_facts, inside_facts, container)
        uuid = SLICE.sub(r"\1", app.uuid)
        found[uuid] = (*found.get(uuid, ()), holder)
    return found


def name_holder(
    app: App,
    process: Mapping[str, Any] | None,
    members: Mapping[tuple[Any, Any, Any], Mapping[str, Any]],
    host_facts: Mapping[str, Any],
    inside_facts: Mapping[str, Any],
    container: int | None,
) -> Holder:
    """One line of query-compute-apps with a face."""
    if process is None:
        return Holder("unknown", app.pid, app.memory_mib, app.name or "it has gone, its memory has not")
    nspid = process.get("nspid") or [app.pid]
    inner, pidns, start = nspid[-1], process.get("pidns"), process.get("start")
    run = members.get((pidns, inner, start))
    if run is None and pidns is None:  # not root there: the namespace is hidden, pid and start are not
        run = next((one for key, one in members.items() if key[1:] == (inner, start)), None)
    match = CONTAINER.search(str(process.get("cgroup") or ""))
    in_container = match[1] if match else None
    kind: Kind
    if run is not None:
        kind = "run"
    elif pidns is not None and pidns == host_facts.get("pidns"):
        kind = "host"
    elif (pidns is not None and pidns == inside_facts.get("pidns")) or (
        in_container is not None and in_container == str(container)
    ):
        kind = "container"
    elif in_container is not None or pidns is not None:
        kind = "other_container"
    else:
        kind = "unknown"
    return Holder(
        kind=kind,
        pid=app.pid,
        memory_mib=app.memory_mib,
        name=app.name,
        inner_pid=inner,
        run_id=run.get("id") if run else None,
        tag=run.get("tag") if run else None,
        container=in_container,
        user=process.get("user"),
        command=" ".join(process.get("cmdline") or []) or process.get("comm"),
        since=process.get("started_at"),
        state=process.get("state"),
    )
