"""Local files against a release that is there, as unified diffs. Pure but for the two calls at the top."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflashctl.agent.releases.release import FOLDER, LINK
from dflashctl.releases.deploy import Source
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine

TIMEOUT_S = 120.0
NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True)
class FileDiff:
    """One path: what became of it from there to here, and the text of that (empty for a mode alone)."""

    path: str
    change: str  # added | removed | changed | mode
    text: str

    def payload(self) -> dict[str, str]:
        return {"path": self.path, "change": self.change, "diff": self.text}


@dataclass(frozen=True)
class Comparison:
    """`drift` says what was changed inside since the deploy; no recipe's file is needed for that."""

    release: str
    facts: dict[str, Any]
    files: tuple[FileDiff, ...]
    drift: tuple[str, ...]


def read_there(engine: Engine, source: Source, release: str | None) -> dict[str, Any]:
    """Facts (agent/releases/drift.py) of a release, or of the current one. Raises NotFound."""
    local = {file.path: [file.sha256, file.mode] for file in source.snapshot.files}
    request = {
        "code_root": engine.host.code_root,
        "release": release,
        "script": source.deploy.script(),
        "local": local,
    }
    return call(engine, "release_drift", request, timeout_s=TIMEOUT_S)


def compare(source: Source, facts: dict[str, Any]) -> Comparison:
    """What a deploy would change in the release, and what somebody changed in it already."""
    here = {file.path: file for file in source.snapshot.files}
    there = {str(entry["path"]): entry for entry in facts["files"]}
    contents: Mapping[str, Mapping[str, Any]] = facts["contents"]
    drifted = set(facts["drifted"])
    found = []
    for path in sorted(here.keys() | there.keys()):
        mine, theirs = here.get(path), there.get(path)
        same = mine and theirs and (mine.sha256, mine.mode) == (theirs["sha256"], theirs["mode"])
        if same and path not in drifted:
            continue
        old_mode = str(theirs["mode"]) if theirs else None
        new_mode = mine.mode if mine else None
        file = mine  # bound now: read() is called at once
        read: Callable[[], bytes] | None = None
        if file is not None and file.mode not in (LINK, FOLDER):
            read = lambda file=file: source.snapshot.read(file)  # noqa: E731
        new = {"link": mine.link} if mine and mine.link is not None else _local(read)
        text = _diff(facts["release"][:8], path, contents.get(path), new)
        if not text and old_mode == new_mode:
            continue
        change = "added" if theirs is None else "removed" if mine is None else "changed" if text else "mode"
        found.append(FileDiff(path, change, _with_mode(old_mode, new_mode, text)))
    return Comparison(facts["release"], facts, tuple(found), tuple(facts["drift"]))


def _local(read: Callable[[], bytes] | None) -> dict[str, Any] | None:
    if read is None:
        return None
    data = read()
    if b"\0" in data[:8192]:
        return {"skipped": f"binary, {len(data)} bytes", "data": data}
    return {"data": data}


def _diff(short: str, path: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    skipped = [str(side["skipped"]) for side in (old, new) if side and "skipped" in side]
    if skipped:
        return f"{path} differs ({skipped[0]})"
    before = _lines(old)
    after = _lines(new)
    names = (f"{short}/{path}" if old is not None else "/dev/null", path if new is not None else "/dev/null")
    lines = difflib.unified_diff(before, after, *names, lineterm="")
    return "\n".join(lines)


def _lines(side: Mapping[str, Any] | None) -> list[str]:
    if side is None:
        return []
    if "link" in side:
        return [f"-> {side['link']}"]
    data = side["data"] if "data" in side else base64.b64decode(str(side["text"]))
    text = data.decode("utf-8", "backslashreplace")
    lines = text.split("\n")
    if lines[-1] == "":
        return lines[:-1]
    return [*lines[:-1], f"{lines[-1]}\n{NO_NEWLINE}"]


def _with_mode(old: str | None, new: str | None, text: str) -> str:
    if old is None or new is None or old == new:
        return text
    return f"mode {old} -> {new}" + (f"\n{text}" if text else "")
