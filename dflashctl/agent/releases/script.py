"""A single script with a place of its own (`deploy.to`): still a release, but switched by a rename over the
script instead of the link `current`.

The name of a release of one file follows from its path, content and mode, so the file in its place tells by
itself which release it is, or that it is none.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, Optional

from .. import AgentError
from ..records import runfolder
from . import ground, release, tree

Request = Dict[str, Any]
"""Its "script" is {"to": absolute path, "path": the script's path in the release}."""


def in_place(script: Dict[str, str]) -> Optional[release.Entry]:
    """The manifest's row of what is at the destination now; None when nothing is there."""
    to = script["to"]
    try:
        info = os.stat(to)
        if not stat.S_ISREG(info.st_mode):
            raise AgentError("verification", "is not a file, so it is not ours to replace", to)
        digest = release.sha256_of_file(os.path.realpath(to))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a link that leads to itself
        raise AgentError("verification", "cannot be read: %s" % error.strerror, to) from None
    mode = release.PROGRAM if info.st_mode & stat.S_IXUSR else release.FILE
    return {"path": script["path"], "sha256": digest, "mode": mode, "size": info.st_size}


def current(script: Dict[str, str]) -> Optional[str]:
    """The release that the file at the destination is, whether or not it was ever deployed."""
    entry = in_place(script)
    return release.release_hash([entry]) if entry else None


def check_place(script: Dict[str, str]) -> None:
    """Raises AgentError when the script could not be put there."""
    parent = os.path.dirname(os.path.realpath(script["to"]))
    if not os.path.isdir(parent):
        raise AgentError("verification", "there is no such folder; nothing switched", parent, "make it first")
    ground.ready(parent, create=False)
    in_place(script)


def refuse_live(request: Request) -> None:
    """A live run reads its script again: for the sources of what it compiles, and in each process that it
    spawns. Raises AgentError("locked") where one was launched with this path in its command.
    """
    if current(request["script"]) == request["release"]:
        return
    to = request["script"]["to"]
    real = os.path.realpath(to)
    for run in runfolder.unfinished_runs(request["state_dir"]):
        record = run.record().value or {}
        cwd, words = str(record.get("cwd") or "/"), map(str, record.get("command") or [])
        if real not in [os.path.realpath(os.path.join(cwd, word)) for word in words if "\0" not in word]:
            continue
        if run.live() or any(not one.dead for one in run.family()):
            tag = record.get("tag") or run.id
            what = "run %s (tag %s) is live and runs this file; nothing switched" % (run.id, tag)
            raise AgentError("locked", what, to, "dflashctl kill %s, or another place as deploy.to" % tag)


def put(request: Request) -> None:
    """Copy the release's file beside its destination, prove the copy, rename it over. A link stays a link:
    what it leads to is replaced. Raises AgentError, OSError."""
    script, name = request["script"], request["release"]
    entry = next(each for each in request["files"] if each["path"] == script["path"])
    target = os.path.realpath(script["to"])
    folder, base = os.path.split(target)
    start = ".%s.dflash-" % base
    for left in os.listdir(folder):
        if left.startswith(start):  # of a deploy that was killed; the lock is ours
            os.unlink(os.path.join(folder, left))
    aside = os.path.join(folder, start + request["id"])
    source = os.path.join(release.release_path(request["code_root"], name), entry["path"])
    try:
        tree.copy(source, aside, entry["mode"])
        _keep_owner(target, aside)
        if release.sha256_of_file(aside) != entry["sha256"]:
            raise AgentError("verification", "the copy is not what was verified; nothing switched", aside)
        tree.sync_one(aside)
        os.replace(aside, target)
    finally:
        try:
            os.unlink(aside)
        except FileNotFoundError:
            pass
    runfolder.sync_folder(folder)


def _keep_owner(target: str, aside: str) -> None:
    try:
        old = os.stat(target)
    except FileNotFoundError:
        return
    new = os.stat(aside)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.chown(aside, old.st_uid, old.st_gid)
