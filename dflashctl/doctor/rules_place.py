"""Room for a run: shared memory, disk, inodes, folders, main memory, limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflashctl.doctor.facts import Facts
from dflashctl.doctor.findings import Finding, failure, not_known, ok, warning
from dflashctl.render.text import count, size
from dflashctl.runs.facts import listed, mapping, text, whole

MIB, GIB = 2**20, 2**30
SHM_LEAST, SHM_GOOD = 64 * MIB, GIB
"""64 MiB is what a container without care gets: NCCL and data loaders die of it."""
DISK_LEAST, DISK_GOOD = GIB, 20 * GIB
"""A drafter of 1.7 B parameters with its optimizer makes checkpoints of more than 20 GB."""
INODES_LEAST, INODES_GOOD = 1_000, 50_000
MEMORY_LEAST, MEMORY_A_GPU = 2 * GIB, 8 * GIB
"""A process for each GPU with torch, CUDA and its data: a rule of thumb."""
USED_MUCH = 0.9
FILES_LEAST, FILES_GOOD, PROCESSES_GOOD = 1_024, 4_096, 1_024
NOBODY = 65534


def shared_memory(facts: Facts) -> Finding:
    shm = mapping(facts.place.get("shm"))
    total, free = whole(shm.get("size")), whole(shm.get("free"))
    mend = "in the container: mount -o remount,size=16G /dev/shm, and the same in its /etc/fstab"
    if shm.get("exists") is not True or total is None or free is None:
        why = text(shm.get("problem")) or "it is not there"
        make = "in the container: mkdir -p /dev/shm && mount -t tmpfs -o size=16G tmpfs /dev/shm"
        return failure(f"/dev/shm: {why}", "NCCL and data loaders cannot start", make)
    found = f"{size(total)}, {size(free)} free"
    if total <= SHM_LEAST:
        return failure(found, "NCCL and data loaders die with a bus error or `No space left on device`", mend)
    if total < SHM_GOOD or free < SHM_LEAST:
        means = "hidden states that travel through shared memory, and many data loaders, need more"
        return warning(found, means, mend if total < SHM_GOOD else "see who fills it: ls -la /dev/shm")
    return ok(found)


def disk(facts: Facts) -> Finding:
    return _fullest(facts, "free", "size", (DISK_LEAST, DISK_GOOD), size, "bytes")


def inodes(facts: Facts) -> Finding:
    return _fullest(facts, "inodes_free", "inodes", (INODES_LEAST, INODES_GOOD), count, "inodes")


def _fullest(
    facts: Facts, free_key: str, all_key: str, least_good: tuple[int, int], words: Any, what: str
) -> Finding:
    """The file system with the least room, of all that a run or a deploy writes to."""
    least, good = least_good
    rooms: dict[Any, tuple[int, int, list[str]]] = {}
    for each, where in _folders(facts):
        free, total = whole(each.get(free_key)), whole(each.get(all_key))
        if free is not None and total:  # some file systems count no inodes
            room = rooms.setdefault((where, whole(each.get("device"))), (free, total, []))
            room[2].append(f"{text(each.get('path'))}{where}")
    if not rooms:
        return not_known("no folder could be looked at")
    free, total, names = min(rooms.values(), key=lambda room: room[0])
    unit = "" if what == "bytes" else f" {what}"
    found = f"{words(free)} of {words(total)}{unit} free at {', '.join(names)}"
    mend = "dflashctl runs prune, or delete old checkpoints there"
    if what == "inodes":
        mend = "delete folders of many small files there: old virtual environments, caches"
    if free < least:
        return failure(found, "deploys are refused, and a run dies at its next checkpoint", mend)
    if free < good:
        return warning(found, "a long run's checkpoints and logs may fill it", mend)
    return ok(found)


def _folders(facts: Facts) -> list[tuple[Mapping[str, Any], str]]:
    """Those inside, and the staging folder of the host."""
    found = [(mapping(each), "") for each in listed(facts.place.get("folders"))]
    if facts.host.container is not None:
        found.append((mapping(mapping(facts.box).get("staging")), " (host)"))
    return found


def folders(facts: Facts) -> Finding:
    """Whether a run may write where hosts.yaml says that it does."""
    seen = [mapping(each) for each in listed(facts.place.get("folders"))]
    for each in seen:
        path, at, owner = text(each.get("path")), text(each.get("at")), whole(each.get("uid"))
        named = path if at == path else f"{at} (where {path} would be made)"
        if each.get("problem"):
            return failure(f"{path}: {text(each.get('problem'))}", "it cannot be used", "look at it inside")
        if each.get("read_only") is True:
            mend = "mount it writable, or name another folder in hosts.yaml"
            return failure(f"{named} is mounted read-only", "deploys and runs cannot write there", mend)
        if _unmapped(facts, owner) and each.get("writable") is not True:
            return failure(
                f"{named} belongs to a user of the host that the container does not know (nobody)",
                "root inside may not write there: Permission denied",
                "on the host: chown -R 100000:100000 the folder behind it (or what lxc.idmap maps to uid 0)",
            )
        if each.get("writable") is False:
            means = "deploys and runs cannot write there"
            return failure(f"{named} belongs to uid {owner}, and may not be written", means, f"chown {at}")
    if not seen:
        return not_known("no folder could be looked at")
    names = ", ".join(dict.fromkeys(text(each.get("path")) for each in seen))
    if all(each.get("writable") is None for each in seen):
        return not_known(f"whether {names} can be written is seen from inside alone")
    return ok(f"{names} can be written")


def _unmapped(facts: Facts, owner: int | None) -> bool:
    """Whether an owner is none of the container's users: seen as nobody inside, or outside of the map."""
    if owner is None or facts.host.container is None:
        return False
    if facts.inside is not None:
        return owner == NOBODY
    return not any(first <= owner < first + number for _, first, number in facts.uid_map)


def memory(facts: Facts) -> Finding:
    """The tightest limit that can be seen: from the host where there is a container, else from inside."""
    outside = mapping(mapping(facts.init.get("place")).get("memory"))
    inside = mapping(facts.place.get("memory"))
    seen = outside if whole(outside.get("limit")) is not None else inside
    limit, total = whole(seen.get("limit")), whole(inside.get("total"))
    total = whole(mapping(facts.box).get("memory_total")) if total is None else total
    room = min((each for each in (limit, total) if each is not None), default=None)
    if room is None:
        return not_known("neither a limit nor the memory of the machine can be seen")
    used, kills = whole(seen.get("used")), whole(seen.get("oom_kills")) or 0
    vmid = facts.host.container
    mend = f"on the host: pct set {vmid} -memory MIB" if vmid else "raise the limit of its control group"
    found = f"{size(room)}{'' if limit is None else ' at most'}"
    found += f", {size(used)} of it used" if used is not None else ""
    if room < MEMORY_LEAST:
        return failure(found, "torch and a target do not fit: runs will be killed for lack of memory", mend)
    if kills:
        return warning(
            f"{found}; the kernel killed {count(kills)} for lack of memory since the container started",
            "a run that ended by signal 9 may have been one of them",
            f"{mend}; or fewer data loaders",
        )
    if used is not None and used > USED_MUCH * room:
        return warning(found, "the next process may be killed", f"see what uses it: `top` inside; or {mend}")
    gpus = 0 if facts.simulated else len(facts.query.gpus)
    if room < gpus * MEMORY_A_GPU:
        means = f"a process for each of {gpus} GPUs wants about {size(MEMORY_A_GPU)}"
        return warning(found, means, mend)
    return ok(found)


def limits(facts: Facts) -> Finding:
    """What a run inherits; `launch` raises the soft limit of open files to the hard one."""
    seen = mapping(mapping(facts.inside).get("limits"))
    _, files = _limit(seen, "nofile")
    processes, _ = _limit(seen, "nproc")
    memlock, _ = _limit(seen, "memlock")
    if files is None or processes is None:
        return not_known("they could not be read")
    shown = [
        f"open files {_words(files)}",
        f"processes {_words(processes)}",
        f"locked memory {'unlimited' if memlock in (-1, None) else size(memlock)}",
    ]
    found = ", ".join(shown)
    where = "the ssh session of the host" if facts.host.container else "the session that starts them"
    mend = f"runs inherit them from {where}: raise nofile and nproc in /etc/security/limits.conf there"
    if 0 <= files < FILES_LEAST:
        return failure(found, "`Too many open files`: torch and its data loaders need more", mend)
    if 0 <= files < FILES_GOOD or 0 <= processes < PROCESSES_GOOD:
        return warning(found, "many data loaders may end in `Too many open files` or `cannot fork`", mend)
    return ok(found)


def _limit(seen: Mapping[str, Any], name: str) -> tuple[int | None, int | None]:
    pair = listed(seen.get(name))
    return (whole(pair[0]), whole(pair[1])) if len(pair) == 2 else (None, None)


def _words(limit: int) -> str:
    return "unlimited" if limit < 0 else count(limit)
