"""What a release holds now, for a comparison with the laptop: its manifest, what was changed in place since,
and the contents that the laptop has otherwise."""

from __future__ import annotations

import base64
import os
import time
from typing import Any, Dict, List, Optional, Set

from .. import AgentError
from . import release, script
from .switching import choose

MAX_FILE_BYTES = 1 << 20
MAX_ALL_BYTES = 24 << 20
LOOK_BYTES = 8192


def release_drift(request: Dict[str, Any], emit: Any) -> Dict[str, Any]:
    """request: code_root, release (a beginning of its name; null: the current one), script|null, local {path:
    [sha256, mode]}.

    Answers release, recipe, deployed_at, deployed_by, git, now, files (the manifest), drift [text], drifted
    [path], contents {path: {"text": base64} | {"link": target} | {"skipped": why}} of each path that is not
    as on the laptop, or not as it was deployed. Raises AgentError("not_found").
    """
    code_root = request["code_root"]
    if request.get("script") and not request.get("release"):
        return _of_script(request)
    name = (
        choose(code_root, request["release"])
        if request.get("release")
        else release.current_release(code_root)
    )
    if name is None:
        raise AgentError("not_found", "no release is current here", code_root, "dflashctl deploy")
    path = release.release_path(code_root, name)
    loaded = release.read_manifest(code_root, name)
    if loaded.value is None:
        what = loaded.problem or "has no manifest, so nothing can be compared"
        raise AgentError("not_found", what, path, "dflashctl deploy")
    files = loaded.value["files"]
    drift = release.differences(path, files)
    drifted = sorted(_named(drift, {entry["path"] for entry in files}))
    local = request.get("local") or {}
    wanted = set(drifted)
    wanted |= {e["path"] for e in files if local.get(e["path"]) != [e["sha256"], e["mode"]]}
    kept = {key: loaded.value.get(key) for key in ("recipe", "deployed_at", "deployed_by", "git")}
    return {
        "release": name,
        "now": time.time(),
        "files": files,
        "drift": drift,
        "drifted": drifted,
        "contents": _contents(path, [e for e in files if e["path"] in wanted]),
        **kept,
    }


def _of_script(request: Dict[str, Any]) -> Dict[str, Any]:
    """As above, of the one script that is in its own place."""
    to, path = request["script"]["to"], request["script"]["path"]
    entry = script.in_place(request["script"])
    if entry is None:
        raise AgentError("not_found", "nothing is there yet", to, "dflashctl deploy")
    name = release.release_hash([entry])
    known = release.read_manifest(request["code_root"], name).value
    local = (request.get("local") or {}).get(path)
    content = _content(os.path.realpath(to), MAX_ALL_BYTES)
    return {
        "release": name,
        "now": time.time(),
        "files": [entry],
        "drift": [] if known else ["%s: is no version that was deployed here" % to],
        "drifted": [],
        "contents": {} if local == [entry["sha256"], entry["mode"]] else {path: content},
        **{key: (known or {}).get(key) for key in ("recipe", "deployed_at", "deployed_by", "git")},
    }


def _named(drift: List[str], paths: Set[str]) -> Set[str]:
    return {path for path in paths if any(line.startswith(path + ": ") for line in drift)}


def _contents(tree: str, entries: List[release.Entry]) -> Dict[str, Dict[str, Any]]:
    found: Dict[str, Dict[str, Any]] = {}
    left = MAX_ALL_BYTES
    for entry in entries:
        if entry["mode"] == release.FOLDER:
            continue
        one = _content(os.path.join(tree, entry["path"]), left)
        if one is not None:
            found[entry["path"]] = one
            left -= len(one.get("text", ""))
    return found


def _content(path: str, left: int) -> Optional[Dict[str, Any]]:
    try:
        if os.path.islink(path):
            return {"link": os.readlink(path)}
        size = os.lstat(path).st_size
        if size > MAX_FILE_BYTES or size > left:
            return {"skipped": "%d bytes are too many to show" % size}
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        return {"skipped": error.strerror}
    if b"\0" in data[:LOOK_BYTES]:
        return {"skipped": "binary, %d bytes" % len(data)}
    return {"text": base64.b64encode(data).decode("ascii")}
