"""Releases under `<code_root>`: their names, manifests, what is in them, which is current. No policy.

    releases/<hash>/                  the deployed tree and .dflash-release.json; immutable once named
    current -> releases/<hash>        switched by rename
    history.jsonl                     one line a switch
    .lock                             flock while a deploy verifies and switches; holds its holder's name
    .incoming-<id>.tar, releases/.tmp-<id>, releases/.old-<id>, .current-<id>     only while one is at work

A manifest is a list of {"path", "sha256", "mode", "size"}: mode is git's ("100644", "100755", "120000" for a
symbolic link, whose content is its target, also given as "link", and "040000" for an empty folder).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from ..records import runfolder

FILE, PROGRAM, LINK, FOLDER = "100644", "100755", "120000", "040000"
MANIFEST = ".dflash-release.json"
RELEASE_PATTERN = re.compile(r"[0-9a-f]{64}")
CHUNK_BYTES = 1 << 20

Entry = Dict[str, Any]


def release_hash(files: Iterable[Entry]) -> str:
    """sha256 of the canonical JSON of a manifest: sorted by path; path, sha256 and mode of each entry."""
    rows = sorted([entry["path"], entry["sha256"], entry["mode"]] for entry in files)
    text = json.dumps(rows, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def sha256_of_text(text: str) -> str:
    """Of a link's target. File names that are no UTF-8 keep their bytes."""
    return hashlib.sha256(os.fsencode(text)).hexdigest()


def sha256_of_file(path: str) -> str:
    """Streams; never follows a symbolic link. Raises OSError."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
            digest.update(chunk)
    return digest.hexdigest()


def releases_folder(code_root: str) -> str:
    return os.path.join(code_root, "releases")


def release_path(code_root: str, release: str) -> str:
    """Raises ValueError for what is no release's name: it becomes a path."""
    if not RELEASE_PATTERN.fullmatch(release):
        raise ValueError("not a release: %r" % release)
    return os.path.join(releases_folder(code_root), release)


def current_release(code_root: str) -> Optional[str]:
    """The hash that `current` points to; None when there is none, or it points elsewhere."""
    try:
        target = os.readlink(os.path.join(code_root, "current"))
    except OSError:
        return None
    name = os.path.basename(target.rstrip("/"))
    return name if RELEASE_PATTERN.fullmatch(name) else None


def list_releases(code_root: str) -> List[str]:
    """Hashes of all releases that have their final name, sorted."""
    try:
        names = os.listdir(releases_folder(code_root))
    except OSError:
        return []
    return sorted(name for name in names if RELEASE_PATTERN.fullmatch(name))


def read_manifest(code_root: str, release: str) -> runfolder.Loaded:
    """A release's .dflash-release.json; damaged ones are named, not guessed."""
    loaded = runfolder.read_json(os.path.join(release_path(code_root, release), MANIFEST))
    if loaded.value is not None and not _is_manifest(loaded.value.get("files")):
        return runfolder.Loaded(None, "%s/%s: no list of files" % (release, MANIFEST))
    return loaded


def _is_manifest(files: Any) -> bool:
    return isinstance(files, list) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("path", "sha256", "mode"))
        for entry in files
    )


def history(code_root: str) -> List[Dict[str, Any]]:
    """The switches, oldest first: at, release, before, by, git, recipe."""
    return list(runfolder.read_lines(os.path.join(code_root, "history.jsonl")))


def previous_release(code_root: str) -> Optional[str]:
    """What was current before the release that is current now."""
    now = current_release(code_root)
    for line in reversed(history(code_root)):
        if line.get("release") == now and line.get("before") != now:
            before = line.get("before")
            return before if isinstance(before, str) else None
    return None


def places(code_root: str) -> Dict[str, Set[str]]:
    """Where each release of the history was put: "" for `current`, else a script's destination."""
    found: Dict[str, Set[str]] = {}
    for line in history(code_root):
        if isinstance(line.get("release"), str):
            found.setdefault(line["release"], set()).add(str(line.get("to") or ""))
    return found


def append_history(code_root: str, line: Dict[str, Any]) -> None:
    """One more switch. Raises OSError."""
    data = json.dumps({"version": runfolder.VERSION, **line}).encode() + b"\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(os.path.join(code_root, "history.jsonl"), flags, 0o644)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest_first(code_root: str) -> List[str]:
    """Releases by when each was last made current, else deployed; the latest first."""
    times: Dict[str, float] = {}
    for name in list_releases(code_root):
        manifest = read_manifest(code_root, name).value or {}
        at = manifest.get("deployed_at")
        times[name] = float(at) if isinstance(at, (int, float)) else 0.0
    for line in history(code_root):
        which, at = line.get("release"), line.get("at")
        if isinstance(which, str) and which in times and isinstance(at, (int, float)):
            times[which] = max(times[which], float(at))
    return sorted(times, key=lambda name: (-times[name], name))


def pinned(state_dir: str) -> Dict[str, str]:
    """{release: run id} of runs that may still be alive: no exit.json, and recorded since this start of the
    container. A record that cannot be read pins nothing by name, so its text is looked at as it is."""
    found: Dict[str, str] = {}
    for run in runfolder.unfinished_runs(state_dir):
        record = run.record()
        if record.value is None:
            for release in _hashes_in(run.file("record.json")):
                found[release] = run.id
        elif runfolder.proc.same_place(record.value) and isinstance(record.value.get("release"), str):
            found[record.value["release"]] = run.id
    return found


def _hashes_in(path: str) -> List[str]:
    try:
        with open(path, "rb") as file:
            text = file.read(CHUNK_BYTES).decode("ascii", "replace")
    except OSError:
        return []
    return re.findall(r"\b[0-9a-f]{64}\b", text)


def walk(tree: str) -> Iterator[Tuple[str, os.stat_result]]:
    """(relative path, lstat) of everything below a release but its manifest and Python's caches."""
    stack = [""]
    while stack:
        folder = stack.pop()
        with os.scandir(os.path.join(tree, folder)) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                path = os.path.join(folder, entry.name)
                if path == MANIFEST or entry.name == "__pycache__":
                    continue
                info = entry.stat(follow_symlinks=False)
                yield path, info
                if stat.S_ISDIR(info.st_mode):
                    stack.append(path)


def differences(tree: str, files: List[Entry]) -> List[str]:
    """Every way in which a tree is not its manifest, one line each; [] when it is, byte for byte."""
    wanted = {entry["path"]: entry for entry in files}
    folders = {parent for path in wanted for parent in parents(path)}
    found: List[str] = []
    seen = set()
    for path, info in walk(tree):
        entry = wanted.get(path)
        seen.add(path)
        if entry is None:
            if not (stat.S_ISDIR(info.st_mode) and path in folders):
                found.append("%s: is not in the manifest" % path)
            continue
        problem = _difference(os.path.join(tree, path), info, entry)
        if problem:
            found.append("%s: %s" % (path, problem))
    found += ["%s: is missing" % path for path in sorted(set(wanted) - seen)]
    return found


def parents(path: str) -> Iterator[str]:
    """a/b/c -> a/b, a."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _difference(path: str, info: os.stat_result, entry: Entry) -> str:
    mode = git_mode(info)
    if mode != entry["mode"]:
        return "is %s, not %s" % (_kind(mode), _kind(entry["mode"]))
    if mode == FOLDER:
        return ""
    if mode == LINK:
        return "" if os.readlink(path) == entry.get("link") else "points to %s" % os.readlink(path)
    try:
        digest = sha256_of_file(path)
    except OSError as error:
        return "cannot be read: %s" % error.strerror
    if digest == entry["sha256"]:
        return ""
    return "sha256 is %s…, not %s… (%d bytes)" % (digest[:12], entry["sha256"][:12], info.st_size)


def git_mode(info: os.stat_result) -> Optional[str]:
    """None for what is neither file, link nor folder."""
    if stat.S_ISREG(info.st_mode):
        return PROGRAM if info.st_mode & stat.S_IXUSR else FILE
    if stat.S_ISLNK(info.st_mode):
        return LINK
    return FOLDER if stat.S_ISDIR(info.st_mode) else None


def _kind(mode: Optional[str]) -> str:
    names = {FILE: "a plain file", PROGRAM: "executable", LINK: "a symbolic link", FOLDER: "a folder"}
    return names.get(mode or "", "a special file")
