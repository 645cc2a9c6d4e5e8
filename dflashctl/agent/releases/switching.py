"""Which release is current: the switch by one rename, going back, and what may then be removed."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from typing import Any, Dict, List, Optional

from .. import AgentError
from ..records import runfolder
from . import ground, proofs, release, script
from .deploylock import DeployLock

INCOMING_START = ".incoming-"
STALE_INCOMING_S = 120.0
"""The lock on the host keeps other deploys away, but the folder may be reached through another host, too: an
archive that nobody wrote to for so long is litter."""

Request = Dict[str, Any]


def switch(request: Request, before: Optional[str]) -> bool:
    """Make request["release"] current by one rename. False: it is already."""
    code_root, name = request["code_root"], request["release"]
    if before == name:
        return False
    note = {"at": time.time(), "release": name, "before": before, "by": request["who"]}
    note.update(recipe=request.get("recipe"), git=request.get("git"))
    if request.get("rolled_back"):
        note["rolled_back"] = True
    if request.get("script"):
        note["to"] = request["script"]["to"]
    # The line comes first: a full disk must stop the deploy before the switch, not after it. A line whose
    # switch did not happen names a release that is not current, and readers look for the current one.
    release.append_history(code_root, note)
    if request.get("script"):
        script.put(request)
        return True
    aside = os.path.join(code_root, ".current-" + request["id"])
    try:
        os.symlink(os.path.join("releases", name), aside)
        os.replace(aside, os.path.join(code_root, "current"))
    finally:
        unlink(aside)
    runfolder.sync_folder(code_root)
    return True


def current(request: Request) -> Optional[str]:
    """The release that is current for this request: of the whole place, or of its one script."""
    if request.get("script"):
        return script.current(request["script"])
    return release.current_release(request["code_root"])


def check_link(code_root: str) -> None:
    """Raises AgentError when `current` is something that is not ours to replace."""
    link = os.path.join(code_root, "current")
    if os.path.lexists(link) and not os.path.islink(link):
        what = "%s is not a symbolic link, so it is not ours to replace" % link
        raise AgentError("verification", what, next="move it away, or choose another code_root in hosts.yaml")


def prune(request: Request) -> List[str]:
    """Remove the oldest releases beyond `keep`; never current, previous, or one that a live run uses.

    Each script's destination counts by itself: scripts are deployed often, and must not push out the releases
    that a rollback goes to.
    """
    code_root = request["code_root"]
    keep = {release.current_release(code_root), release.previous_release(code_root)}
    keep |= set(release.pinned(request["state_dir"]))
    gone: List[str] = []
    by_age, places = release.newest_first(code_root), release.places(code_root)
    for place in {place for found in places.values() for place in found} | {""}:
        of_place = [name for name in by_age if place in places.get(name, {""})]
        keep.update(of_place[: max(int(request["keep"]), 1)])
    for name in by_age:
        if name not in keep:
            path = release.release_path(code_root, name)
            aside = os.path.join(os.path.dirname(path), ".old-" + name)
            os.rename(path, aside)  # it disappears at once; a crash below leaves no half release
            shutil.rmtree(aside, ignore_errors=True)
            gone.append(name)
    sweep_releases(code_root)
    return gone


def sweep(code_root: str, keep: str) -> None:
    """Remove what a deploy that was killed left behind. The lock is held, so nobody works on it."""
    for entry in os.listdir(code_root):
        path = os.path.join(code_root, entry)
        if entry.startswith(".current-"):
            unlink(path)
        elif entry.startswith(INCOMING_START) and entry != keep:
            try:
                if time.time() - os.lstat(path).st_mtime > STALE_INCOMING_S:
                    os.unlink(path)
            except FileNotFoundError:
                pass
    sweep_releases(code_root)


def sweep_releases(code_root: str) -> None:
    """Remove half-built and half-removed trees."""
    folder = release.releases_folder(code_root)
    os.makedirs(folder, 0o755, exist_ok=True)
    for entry in os.listdir(folder):
        if entry.startswith((".tmp-", ".old-")):
            shutil.rmtree(os.path.join(folder, entry), ignore_errors=True)


def roll_back(request: Request, emit: Any) -> Dict[str, Any]:
    """Make an older release current again, after proving that it is what it was.

    request: code_root, state_dir, id, release (a beginning of its name; null: the one before), who, wait_s,
    dry_run. Answers {"release", "before", "switched", "verified", "compiled", "python", "python_version",
    "entry", "imports", "deployed_at", "deployed_by", "git", "recipe", "pinned": {release: run id}}.
    Raises AgentError: not_found (no such release), usage (a script), verification (it was changed), locked.
    """
    code_root = request["code_root"]
    if not os.path.isdir(release.releases_folder(code_root)):
        raise AgentError("not_found", "nothing was ever deployed here", code_root, "dflashctl deploy")
    try:
        with DeployLock(code_root, request["who"], "rollback", float(request.get("wait_s") or 0)):
            name = choose(code_root, request.get("release"))
            _refuse_script(code_root, name)
            answer = _prove_again(code_root, name)
            before = release.current_release(code_root)
            answer.update(before=before, switched=False, pinned=release.pinned(request["state_dir"]))
            if not request.get("dry_run"):
                check_link(code_root)
                emit({"phase": "switching"})
                if getattr(emit, "gone", False):
                    raise AgentError(
                        "unreachable", "nobody waits for this rollback any more; nothing switched"
                    )
                wish = dict(
                    request, release=name, recipe=answer["recipe"], git=answer["git"], rolled_back=True
                )
                answer["switched"] = switch(wish, before)
            return answer
    except OSError as error:
        raise ground.explain(error, code_root) from error


def choose(code_root: str, wanted: Optional[str]) -> str:
    """The release whose name starts with `wanted`; without, the one that was current before.

    Raises AgentError("not_found") naming those that are there.
    """
    there = release.list_releases(code_root)
    shown = ", ".join(name[:8] for name in release.newest_first(code_root)) or "none"
    if wanted is None:
        before = release.previous_release(code_root)
        if before is None or before not in there:
            what = "there is no release before the current one" if before is None else "release %s is gone"
            current = release.current_release(code_root)
            others = [name[:8] for name in release.newest_first(code_root) if name != current]
            hint = "name one of: " + ", ".join(others) if others else "nothing else is there: deploy another"
            raise AgentError("not_found", what % before[:8] if before else what, code_root, hint)
        return before
    hits = [name for name in there if name.startswith(wanted)] if wanted else []
    if len(hits) != 1:
        what = "no release starts with %r" if not hits else "several releases start with %r"
        raise AgentError("not_found", what % wanted, code_root, "there are: " + shown)
    return hits[0]


def _refuse_script(code_root: str, name: str) -> None:
    """`current` must not become a lone script, without the tree that its runs import."""
    places = release.places(code_root).get(name, {""})
    if "" not in places:
        what = "release %s is a single script, for %s; nothing switched" % (
            name[:8],
            ", ".join(sorted(places)),
        )
        raise AgentError("usage", what, code_root, "deploy its source again, or name another release")


def _prove_again(code_root: str, name: str) -> Dict[str, Any]:
    loaded = release.read_manifest(code_root, name)
    path = release.release_path(code_root, name)
    if loaded.value is None:
        raise AgentError("verification", loaded.problem or "has no manifest", path, "deploy it again")
    files = loaded.value["files"]
    wrong = release.differences(path, files)
    if release.release_hash(files) != name:
        wrong.insert(0, "%s: does not have the release's hash" % release.MANIFEST)
    if wrong:
        what = "release %s was changed in place; nothing switched:\n  %s" % (
            name[:8],
            "\n  ".join(wrong[:10]),
        )
        raise AgentError("verification", what, path, "deploy its source again, or name another release")
    compiled, problems = proofs.compile_tree(path, files)
    if problems:
        what = "release %s does not compile with %s any more; nothing switched:\n%s"
        raise AgentError("verification", what % (name[:8], sys.executable, "\n".join(problems[:10])), path)
    entry = loaded.value.get("entry")
    origin = proofs.find_module(entry, path, loaded.value.get("pythonpath") or "") if entry else None
    kept = {key: loaded.value.get(key) for key in ("deployed_at", "deployed_by", "git", "recipe")}
    return {
        "release": name,
        "verified": len(files),
        "compiled": compiled,
        "python": sys.executable,
        "python_version": platform.python_version(),
        "entry": entry,
        "imports": origin,
        **kept,
    }


def unlink(path: str) -> None:
    """Remove a file if it can be; what stays is swept later."""
    try:
        os.unlink(path)
    except OSError:
        pass
