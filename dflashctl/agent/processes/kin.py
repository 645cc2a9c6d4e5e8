"""Which processes are a run's, by descent and by environment, never by a command line."""

from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Set

from . import proc


def run_of(pid: int) -> Optional[str]:
    """DFLASH_RUN_ID in the process's first environment. None also when that cannot be read, and for programs
    that overwrite it to show a title."""
    for entry in (proc.read("/proc/%d/environ" % pid) or b"").split(b"\0"):
        if entry.startswith(b"DFLASH_RUN_ID="):
            return entry[len(b"DFLASH_RUN_ID=") :].decode("utf-8", "replace")
    return None


def tagged(processes: proc.Table) -> Dict[str, List[int]]:
    """Run id -> pids whose environment names it: one read a process, for all runs together."""
    found: Dict[str, List[int]] = {}
    for pid in processes:
        run_id = run_of(pid)
        if run_id:
            found.setdefault(run_id, []).append(pid)
    return found


def children_of(processes: proc.Table) -> Dict[int, List[int]]:
    children: Dict[int, List[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    return children


def descendants(roots: Iterable[int], processes: proc.Table) -> Set[int]:
    """Pids below the roots, the roots themselves not included (unless below one another)."""
    children = children_of(processes)
    found: Set[int] = set()
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def family(
    processes: proc.Table,
    *,
    supervisor: Optional[proc.Identity] = None,
    known: Iterable[proc.Identity] = (),
    tagged: Iterable[int] = (),
) -> List[proc.Process]:
    """The processes of a run, the supervisor not among them; sorted by pid, zombies included.

    A member is what descends from the supervisor (a subreaper: it also keeps what forked twice or made its
    own session), an identity that the supervisor wrote down while it lived (`known`), a process whose
    environment carries the run's id (`tagged`: of tagged(), for that id), or a descendant of one of these.
    The last three also hold when the supervisor was killed. The caller checks the boot (proc.same_place)
    before it passes recorded identities.
    """
    top = proc.living(supervisor, processes)
    members = {pid for pid in tagged if pid in processes}
    for identity in known:
        process = processes.get(identity[0])
        if process is not None and process.start == identity[1]:
            members.add(process.pid)
    members |= descendants(members | ({top.pid} if top else set()), processes)
    if top is not None:
        members.discard(top.pid)
    return [processes[pid] for pid in sorted(members)]


def ancestors(pid: int, processes: proc.Table) -> Set[int]:
    """A process and everything above it: what a kill must never reach when it is its own."""
    found: Set[int] = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].ppid
    return found
