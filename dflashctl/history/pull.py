"""Bring home what a run left: resumable, verified by hash, never over a newer file or out of the folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflashctl.config.hosts import Host
from dflashctl.errors import NotFound, UsageError, VerificationFailed
from dflashctl.history.arrival import Arrival, Line, alone, fetch
from dflashctl.remote.agent_call import Event, call
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine
from dflashctl.runs.facts import listed, mapping, number, text, whole

What = Literal["checkpoints", "metrics", "log"]
WHAT: tuple[What, ...] = ("checkpoints", "metrics", "log")
PART = ".dflash-part"
LIST_TIMEOUT_S = 60.0
ROUNDS = 3
"""Of a live run that had removed all that was listed by the time it was to be copied."""
CLOCK_SLACK_S = 2.0
"""File systems and clocks round."""


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
        for each in wanted:
            one_file(line, each, what, result, told)
        for link in map(mapping, listed(answer.get("links"))):
            one_link(text(link.get("path")), text(link.get("target")), result)
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename or result.folder}: {error.strerror or error}",
            next="make room, or choose another folder: --to; what has arrived is not sent again",
        ) from error
    finally:
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


def problem_of(path: str) -> str | None:
    """Why a name from over there must not become a path here; None for a good one."""
    if not path or "\0" in path:
        return "not a name"
    if path.startswith("/") or path.startswith("~") or "\\" in path or ":" in path.split("/")[0][:2]:
        return "not a path below the folder"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "leads out of the folder"
    return None


def place_of(folder: Path, path: str) -> Path | str:
    """Where a file goes, or why it may not: also a link that somebody made here must not lead out."""
    problem = problem_of(path)
    if problem is not None:
        return problem
    target = folder / path
    inside = folder.resolve()
    if not (target.parent.resolve() == inside or inside in target.parent.resolve().parents):
        return "a link here leads out of the folder"
    if target.is_symlink():
        return "a link of this name is here already"
    if target.is_dir():
        return "a folder of this name is here already"
    if target.exists() and not target.is_file():
        return "something of this name is here that is no file"  # a pipe would be waited for
    return target


def one_file(line: Line, remote: Remote, what: What, result: Result, told: Told) -> None:
    """Fetch, verify, put in place; or say why not."""
    place = place_of(result.folder, remote.path)
    if isinstance(place, str):
        result.refused.append((remote.path, place))
        return
    # What is here already is offered as the beginning: the answer to a file that is the same is no byte.
    here = place.stat() if place.exists() else None
    if here is not None and here.st_mtime > remote.mtime + CLOCK_SLACK_S:
        if here.st_size == remote.size and _same(line, remote, what, result, place):
            result.same.append(remote.path)
        else:
            result.refused.append((remote.path, "the file here is newer"))
        return
    if here is not None and here.st_size == remote.size and _same(line, remote, what, result, place):
        result.same.append(remote.path)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(place.name + PART)
    if part.is_symlink() or (part.exists() and not part.is_file()):
        kind = "a link" if part.is_symlink() else "a folder" if part.is_dir() else "no file"
        result.refused.append((remote.path, f"{kind} stands where its part would go: {part.name}"))
        return
    with alone(part) as file:
        if file is None:
            result.refused.append((remote.path, "another pull is bringing it"))
            return
        arrival = Arrival(file, lambda done: told(remote.path, done, remote.size))
        try:
            there = fetch(line, _request(line.host, remote, what, result), arrival)
        finally:
            result.bytes += arrival.received
        if there is None:
            part.unlink()
            result.gone.append(remote.path)
            return
        file.flush()
        if (there, remote.size) != (arrival.sha256, part.stat().st_size):
            part.unlink()
            raise VerificationFailed(
                f"{remote.path} arrived different from what it is there",
                where=line.host.name,
                next="run it again",
            )
        part.chmod(remote.mode & 0o777 | 0o600)
        os.utime(part, (remote.mtime, remote.mtime))
        part.replace(place)
    result.fetched.append(remote.path)


def _request(host: Host, remote: Remote, what: What, result: Result) -> dict[str, Any]:
    return {
        "state_dir": host.state_dir, "id": result.id, "what": what, "path": remote.path, "size": remote.size,
    }  # fmt: skip


def _same(line: Line, remote: Remote, what: What, result: Result, place: Path) -> bool:
    """Has the file over there the bytes that this one has? Asked by hash; another answer is hung up on."""
    mine = sha256(place)
    if remote.size == 0:
        return True

    class Differs(Exception):
        pass

    def listen(event: Event) -> None:
        if "from" in event and whole(event.get("from")) != remote.size:
            raise Differs

    request = _request(line.host, remote, what, result)
    request |= {"offset": remote.size, "prefix_sha256": mine}
    try:
        return text(line.call("pull_file", request, listen).get("sha256")) == mine
    except Differs:
        line.close()
        return False


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
