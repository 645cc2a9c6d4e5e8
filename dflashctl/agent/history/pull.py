"""Operations `pull_list` and `pull_files`: what a run left, file by file, from any byte on.

`pull_list`: state_dir, tag | id, what ("checkpoints" | "metrics" | "log"). Answer: {"id", "tag", "files":
[{"path" (relative, with /), "size", "mtime", "mode"}], "links": [{"path", "target"}], "skipped": [path]}
(neither file, folder nor link). Folders that are links, or hidden, are not entered.

`pull_files`: state_dir, id, what, raw, files: [{"path", "offset" and "prefix_sha256" of what the caller has,
"compare"}]; many small ones in one call, whose start costs more than they do. With `raw`, SAMPLE comes before
everything else as a frame of data: by it the caller sees whether bytes arrive as they are sent. For each file
in turn {"file": its number, "from": offset (0 when the prefix is another), "size", "as": what tells it from
another file of its name}, its bytes from there on (with `raw` frames of data, else {"data": base64}), and how
it ended: {"end": number} with
    "sha256" of all bytes, "size", "mtime"   it is whole: all that it had when it was opened
    "differs": true                          to `compare`: it is not what the caller has; no byte was sent
    "gone": true                             removed since the list was made, as a run does with old ones
    "refused": why                           unreadable, or changed while it was read
Answer: {}.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from typing import Any, BinaryIO, Dict, Iterator, List, Tuple

from .. import AgentError
from ..logs.ownlog import log_file
from ..records.pick import one_run
from ..records.runfolder import RunFolder

CHUNK_BYTES = 192 * 2**10
"""So few that the pipe behind it is never empty while the next piece is hashed."""
SAMPLE = bytes(range(256)) + b"\r\n\n\r\r\n~.\x03\x04"
"""Whatever is not binary-clean changes it: a terminal, a filter of control characters, seven bits."""
METRICS = (
    "record.json", "recipe.yaml", "environment.json", "events.jsonl", "heartbeat.json", "metrics.jsonl",
    "summary.json", "root_cause.json", "exit.json",
)  # fmt: skip


def pull_list(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text. Raises AgentError("not_found")."""
    run = one_run(request)
    root, names = _where(run, str(request["what"]))
    files: List[Dict[str, Any]] = []
    links: List[Dict[str, str]] = []
    skipped: List[str] = []
    for path in sorted(_walk(root)) if names is None else names:
        full = os.path.join(root, path)
        try:
            status = os.lstat(full)
        except OSError:
            continue
        if stat.S_ISLNK(status.st_mode):
            links.append({"path": path, "target": os.readlink(full)})
        elif stat.S_ISREG(status.st_mode):
            mode = stat.S_IMODE(status.st_mode)
            files.append({"path": path, "size": status.st_size, "mtime": status.st_mtime, "mode": mode})
        elif not stat.S_ISDIR(status.st_mode):
            skipped.append(path)
    tag = (run.record().value or {}).get("tag")
    return {"id": run.id, "tag": tag, "files": files, "links": links, "skipped": skipped}


def _where(run: RunFolder, what: str) -> Tuple[str, Any]:
    """(folder, names in it, or None for everything below)."""
    if what == "checkpoints":
        return run.file("checkpoints"), None
    if what == "metrics":
        return run.path, list(METRICS)
    if what == "log":
        record = run.record().value or {}
        log = log_file(run, record)
        if log.startswith("/proc/"):
            what = "the log was removed; only its program still has it"
            hint = "dflashctl logs %s -n 0 > log" % (record.get("tag") or run.id)
            raise AgentError("not_found", what, run.log_path(record), hint)
        return os.path.dirname(log), [os.path.basename(log)] if log else []
    raise AgentError("usage", "nothing called %r can be pulled" % what)


def _walk(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        # A checkpoint that is being written is a hidden folder aside, and gone before it could be read.
        folders[:] = [name for name in folders if not name.startswith(".")]
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in files + linked:
            yield os.path.relpath(os.path.join(folder, name), root)


def pull_files(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """See the module's text."""
    try:
        run = one_run(request)
    except AgentError as error:
        if error.kind != "not_found":
            raise
        for number in range(len(request["files"])):  # `runs prune` was here meanwhile
            emit({"end": number, "gone": True})
        return {}
    root, _ = _where(run, str(request["what"]))
    raw, whole = bool(request.get("raw")), request["what"] == "checkpoints"
    if raw:
        emit.data(SAMPLE)
    for number, asked in enumerate(request["files"]):
        if getattr(emit, "gone", False):
            break
        try:
            end = _send(os.path.join(root, str(asked["path"])), number, asked, raw, whole, emit)
        except (FileNotFoundError, NotADirectoryError):
            end = {"gone": True}
        except OSError as error:
            end = {"refused": "cannot be read there: %s" % (error.strerror or error)}
        emit({"end": number, **end})
    return {}


def _send(path: str, number: int, asked: Dict[str, Any], raw: bool, whole: bool, emit: Any) -> Dict[str, Any]:
    """How it ended. `whole`: its writer has finished with it; a log and its like may grow. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            return {"refused": "it is no regular file any more"}
        size, offset = before.st_size, int(asked.get("offset") or 0)
        digest = hashlib.sha256()
        if not 0 < offset <= size or not _has(file, offset, digest, str(asked.get("prefix_sha256"))):
            file.seek(0)
            digest, offset = hashlib.sha256(), 0
        if asked.get("compare") and offset != size:
            return {"differs": True}
        same = "%d %d" % (before.st_ino, before.st_mtime_ns if whole else 0)
        emit({"file": number, "from": offset, "size": size, "as": same})
        while offset < size and not getattr(emit, "gone", False):
            data = file.read(min(CHUNK_BYTES, size - offset))
            if not data:
                return {"refused": "it became shorter there while it was read"}
            digest.update(data)
            offset += len(data)
            if raw:
                emit.data(data)
            else:
                emit({"data": base64.b64encode(data).decode("ascii")})
        after = os.fstat(descriptor)
        if whole and (after.st_size, after.st_mtime_ns) != (size, before.st_mtime_ns):
            return {"refused": "it changed there while it was read"}
    return {"sha256": digest.hexdigest(), "size": size, "mtime": before.st_mtime}


def _has(file: BinaryIO, count: int, digest: Any, wanted: str) -> bool:
    """Feeds the first `count` bytes to `digest`; are they those that the caller has?"""
    while count > 0:
        data = file.read(min(count, 2**20))
        if not data:
            return False
        digest.update(data)
        count -= len(data)
    return bool(digest.hexdigest() == wanted)
