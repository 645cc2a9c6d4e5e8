"""Bring home what a run left: resumable, verified by hash, never over a newer file or out of the folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflashctl.config.hosts import Host
from dflashctl.errors import NotFound, UsageError
from dflashctl.history.arrival import Arrival, Line, alone, compare, fetch
from dflashctl.history.places import part_of, place_of, problem_of, problem_of_part
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine
from dflashctl.runs.facts import listed, mapping, number, text, whole

What = Literal["checkpoints", "metrics", "log"]
WHAT: tuple[What, ...] = ("checkpoints", "metrics", "log")
LIST_TIMEOUT_S = 60.0
ROUNDS = 3
"""Of a live run that had removed all that was listed by the time it was to be copied."""
CLOCK_SLACK_S = 2.0
"""File systems and clocks round."""
BATCH_FILES = 100
"""Each is open here while they come; a Mac allows 256."""
BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Remote:
    path: str
    size: int
    mtime: float
    mode: int


@dataclass
class Result:
    """What became of each file."""

    id: str = ""
    tag: str = ""
    folder: Path = Path()
    fetched: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(name, why)."""
    gone: list[str] = field(default_factory=list)
    """Removed over there between the list and the copy: a live run keeps its newest checkpoints only."""
    bytes: int = 0
    as_base64: bool = False
    """Something on the way changed bytes."""


Told = Callable[[str, int, int], None]
"""Called with (path, bytes done, bytes in all)."""


def pull(
    host: Host,
    *,
    tag: str | None,
    what: What,
    into: Path | None,
    told: Told = lambda path, done, size: None,
    connect: Callable[[Host], Engine] = open_engine,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Into `into`, by default `pulled/<tag>/<id>/<what>` here. Lost contact is survived by connecting again.

    Raises NotFound (no such run, nothing there), Unreachable (several times in a row without progress),
    UsageError (the folder here cannot be written).
    """
    for _ in range(ROUNDS):
        result = _once(host, tag, what, into, told, connect, sleep)
        if not result.gone or result.fetched or result.same or result.linked or result.refused:
            return result
    name = result.tag or result.id
    raise NotFound(
        f"run {name} removes its {what} sooner than they can be copied",
        where=host.name,
        next=f"dflashctl pull {name}, once it has ended or saves less often",
    )


def _once(
    host: Host,
    tag: str | None,
    what: What,
    into: Path | None,
    told: Told,
    connect: Callable[[Host], Engine],
    sleep: Callable[[float], None],
) -> Result:
    """All that is there when it is listed."""
    with connect(host) as engine:
        answer = call(
            engine,
            "pull_list",
            {"state_dir": host.state_dir, "tag": tag, "what": what},
            timeout_s=LIST_TIMEOUT_S,
        )
    result = Result(text(answer.get("id")), text(answer.get("tag")))
    safe_tag = result.tag if problem_of(result.tag) is None and "/" not in result.tag else "run"
    result.folder = into or Path("pulled") / safe_tag / result.id / what
    wanted = [read_entry(mapping(each)) for each in listed(answer.get("files"))]
    result.refused += [(text(each), "neither file nor folder") for each in listed(answer.get("skipped"))]
    if not wanted and not listed(answer.get("links")):
        raise nothing(result, what, host)
    line = Line(host, connect, sleep)
    try:
        for batch in batches(wanted):
            bring(line, batch, what, result, told)
        for link in map(mapping, listed(answer.get("links"))):
            one_link(text(link.get("path")), text(link.get("target")), result)
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename or result.folder}: {error.strerror or error}",
            next="make room, or choose another folder: --to; what has arrived is not sent again",
        ) from error
    finally:
        result.as_base64 = not line.raw
        line.close()
    _remove_empty_folders(result)
    return result


def _remove_empty_folders(result: Result) -> None:
    """Of checkpoints that went before any of their files came: an empty one looks like a checkpoint."""
    for path in result.gone:
        for folder in list(Path(path).parents)[:-1]:
            with contextlib.suppress(OSError):  # files that came before the others went stay
                (result.folder / folder).rmdir()


def nothing(result: Result, what: What, host: Host) -> NotFound:
    name = result.tag or result.id
    hint = f"dflashctl status {name}"
    hint += f" · dflashctl pull {name} --what metrics" if what == "checkpoints" else ""
    return NotFound(f"run {name} has no {what}", where=host.name, next=hint)


def read_entry(raw: Mapping[str, Any]) -> Remote:
    mtime, mode = number(raw.get("mtime")) or 0.0, whole(raw.get("mode")) or 0o644
    return Remote(text(raw.get("path")), max(whole(raw.get("size")) or 0, 0), mtime, mode)


def batches(files: Sequence[Remote]) -> Iterator[list[Remote]]:
    """What one call brings: many small files, or few large ones."""
    batch: list[Remote] = []
    for each in files:
        if batch and (len(batch) == BATCH_FILES or sum(e.size for e in batch) + each.size > BATCH_BYTES):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def bring(line: Line, files: Sequence[Remote], what: What, result: Result, told: Told) -> None:
    """Fetch, verify and put in place each file; or say why not."""
    places: list[tuple[Remote, Path]] = []
    for remote in files:
        place = place_of(result.folder, remote.path)
        if isinstance(place, str):
            result.refused.append((remote.path, place))
        else:
            places.append((remote, place))
    request = {"state_dir": line.host.state_dir, "id": result.id, "what": what}
    same = compare(
        line,
        request,
        {
            remote.path: (remote.size, sha256(place))
            for remote, place in places
            if place.exists() and place.stat().st_size == remote.size
        },
    )
    with contextlib.ExitStack() as open_parts:
        arrivals = {}
        for remote, place in places:
            if remote.path in same:
                result.same.append(remote.path)
            elif place.exists() and place.stat().st_mtime > remote.mtime + CLOCK_SLACK_S:
                result.refused.append((remote.path, "the file here is newer"))
            elif arrival := _open(open_parts, remote, place, result, told):
                arrivals[arrival] = (remote, place)
        try:
            fetch(line, request, list(arrivals), lambda each: _settle(each, *arrivals[each], result))
        finally:
            result.bytes += sum(each.received for each in arrivals)


def _open(
    open_parts: contextlib.ExitStack, remote: Remote, place: Path, result: Result, told: Told
) -> Arrival | None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(place)
    problem = problem_of_part(part)
    file = open_parts.enter_context(alone(part)) if problem is None else None
    if file is None:
        result.refused.append((remote.path, problem or "another pull is bringing it"))
        return None
    return Arrival(remote.path, file, lambda done, size: told(remote.path, done, size))


def _settle(arrival: Arrival, remote: Remote, place: Path, result: Result) -> None:
    """It has ended over there, and what is here is what was sent."""
    end, part = arrival.end or {}, part_of(place)
    if end.get("gone") is True:
        part.unlink()
        result.gone.append(remote.path)
    elif "refused" in end:
        result.refused.append((remote.path, text(end["refused"])))
    else:
        part.chmod(remote.mode & 0o777 | 0o600)
        mtime = number(end.get("mtime")) or remote.mtime
        os.utime(part, (mtime, mtime))
        part.replace(place)
        result.fetched.append(remote.path)


def one_link(path: str, target: str, result: Result) -> None:
    """A link whose target lies in the folder is made here too; any other is refused."""
    place = place_of(result.folder, path)
    if isinstance(place, str) and place != "a link of this name is here already":
        result.refused.append((path, place))
        return
    here = result.folder / path
    inside = result.folder.resolve()
    if target.startswith("/") or inside not in Path(os.path.normpath(inside / path / ".." / target)).parents:
        result.refused.append((path, "a link that leaves the folder"))
        return
    if here.is_symlink():
        if str(here.readlink()) != target:
            result.refused.append((path, "another link of this name is here already"))
        else:
            result.same.append(path)
        return
    here.parent.mkdir(parents=True, exist_ok=True)
    here.symlink_to(target)
    result.linked.append(path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
