"""Operations of a deploy, inside: what is here (release_facts), and prove, name and switch (install_release).

    lock -> sweep -> build in .tmp-<id> -> verify every byte -> compile -> expect -> imports -> rename to
    releases/<hash> -> switch `current` -> prune

Until the rename of `current` nothing that a run could see has changed; whatever fails before it removes what
it made. A process that is killed outright leaves only names that the next deploy sweeps.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from typing import Any, Dict, List, Optional

from .. import AgentError
from ..records import runfolder
from . import ground, proofs, release, script, switching, tree
from .deploylock import DeployLock, holder

Request = Dict[str, Any]


def release_facts(request: Request, emit: Any) -> Dict[str, Any]:
    """What a deploy must know before it decides what to send.

    request: code_root, state_dir, want [sha256], prepare (create code_root; false for a dry
    run, null for a mere look), install (a
    request of install_release, or null): when that release is here already, nothing has to be sent, and it is
    proven and made current at once; its answer is then "proof".
    Answers now (this machine's clock), have [sha256] (claimed by manifests of releases that are here),
    releases, current, previous, pinned, python, python_version, free_bytes, free_inodes (null: no fixed
    number), lock.
    Raises AgentError("verification") when nothing can be written there.
    """
    code_root = request["code_root"]
    prepare = request.get("prepare")
    place = ground.existing(code_root) if prepare is None else ground.ready(code_root, create=bool(prepare))
    space, places = os.statvfs(place), release.places(code_root)
    answer = {
        "now": time.time(),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "free_bytes": space.f_bavail * space.f_frsize,
        "free_inodes": space.f_favail if space.f_files else None,
        "current": switching.current(request),
        "previous": release.previous_release(code_root),
        "releases": [
            dict(_summary(code_root, name), to=sorted(places.get(name, {""}) - {""}))
            for name in release.list_releases(code_root)
        ],
        "pinned": release.pinned(request["state_dir"]),
        "have": sorted(tree.holders_of(code_root, request.get("want", []))),
        "lock": holder(code_root),
    }
    if request.get("script") and prepare is not None:
        script.check_place(request["script"])
    wish = request.get("install")
    if wish and wish["release"] in release.list_releases(code_root):
        proof = install_release(wish, emit)
        if "missing" not in proof:
            answer["proof"] = proof
    return answer


def _summary(code_root: str, name: str) -> Dict[str, Any]:
    loaded = release.read_manifest(code_root, name)
    if loaded.value is None:
        return {"release": name, "problem": loaded.problem or "has no manifest"}
    kept = ("deployed_at", "deployed_by", "git", "recipe", "python")
    return {
        "release": name,
        "files": len(loaded.value["files"]),
        **{key: loaded.value.get(key) for key in kept},
    }


def incoming_path(code_root: str, deploy_id: str) -> str:
    """Where the archive of a deploy lands."""
    if not deploy_id.isalnum():
        raise AgentError("usage", "not the id of a deploy: %r" % deploy_id)
    return os.path.join(code_root, switching.INCOMING_START + deploy_id + ".tar")


def install_release(request: Request, emit: Any) -> Dict[str, Any]:
    """Prove a release and make it current.

    request: code_root, state_dir, id, release, files (the manifest), archive_size (null: none was sent),
    keep, expect, entry|null, pythonpath, recipe, git, who, wait_s, script|null (agent/releases/script.py).
    Answers {"missing": [sha256]} when contents are nowhere to be had (another deploy pruned them, or a file
    of an older release was changed): send them and ask again. Otherwise the proofs: release, before,
    verified, compiled, expect, imports, pruned, switched (false: it was current already), reused, warnings.
    Raises AgentError("verification") with nothing switched and nothing left behind; ("locked").
    """
    code_root = request["code_root"]
    archive = incoming_path(code_root, request["id"])
    mask = os.umask(0o022)
    try:
        release.release_path(code_root, request["release"])
        tree.check_entries(request["files"])
        if release.release_hash(request["files"]) != request["release"]:
            raise AgentError("usage", "the manifest does not have the hash %s" % request["release"])
        what = "%s %s" % (request["recipe"], request["release"][:8])
        with DeployLock(code_root, request["who"], what, float(request.get("wait_s") or 0)):
            switching.sweep(code_root, keep=os.path.basename(archive))
            return _install(request, emit, archive)
    except OSError as error:
        raise ground.explain(error, code_root) from error
    finally:
        os.umask(mask)
        switching.unlink(archive)


def _install(request: Request, emit: Any, archive: str) -> Dict[str, Any]:
    code_root, name, files = request["code_root"], request["release"], request["files"]
    final = release.release_path(code_root, name)
    aside = os.path.join(release.releases_folder(code_root), ".tmp-" + request["id"])
    if request.get("script"):
        script.check_place(request["script"])
        script.refuse_live(request)
    else:
        switching.check_link(code_root)
    damage = release.differences(final, files) if os.path.lexists(final) else None
    if damage and name in release.pinned(request["state_dir"]):
        raise AgentError(
            "verification",
            "release %s was changed in place and run %s uses it:\n  %s"
            % (name[:8], release.pinned(request["state_dir"])[name], _shorten(damage)),
            final,
            "kill that run first; a release in use is never touched",
        )
    fresh = damage is None or bool(damage)
    try:
        if fresh:
            _step(emit, "unpacking")
            _check_archive(archive, request.get("archive_size"))
            wanted = [entry["sha256"] for entry in files]
            source = archive if request.get("archive_size") is not None else None
            missing = tree.build(aside, files, source, tree.holders_of(code_root, wanted))
            if missing:
                return {"missing": missing}
            _step(emit, "verifying")
            wrong = release.differences(aside, files)
            if wrong:
                raise AgentError("verification", "the tree is not what was sent:\n  " + _shorten(wrong))
        result = _prove(request, emit, aside if fresh else final)
        _step(emit, "switching")
        if fresh:
            _name(request, aside, final, replace=damage is not None)
        before = switching.current(request)
        result["switched"] = switching.switch(request, before)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    result.update(before=before, reused=not fresh, pruned=[], warnings=[])
    try:
        result["pruned"] = switching.prune(request)
    except OSError as error:  # the new release is current: that is the news, and it stays
        result["warnings"].append("old releases could not be removed: %s" % error)
    return result


def _step(emit: Any, name: str) -> None:
    """Say what comes next. Raises AgentError when nobody listens any more: then nothing is to be switched."""
    emit({"phase": name})
    if getattr(emit, "gone", False):
        raise AgentError("unreachable", "nobody waits for this deploy any more; nothing switched")


def _check_archive(archive: str, size: Optional[int]) -> None:
    """A push that says that it went well proves nothing."""
    if size is None:
        return
    try:
        arrived = os.lstat(archive).st_size
    except FileNotFoundError:
        raise AgentError("verification", "the archive did not arrive", archive, "deploy again") from None
    if arrived != size:
        what = "the archive arrived with %d of %d bytes" % (arrived, size)
        raise AgentError("verification", what, archive, "look for a full disk, then deploy again")


def _prove(request: Request, emit: Any, where: str) -> Dict[str, Any]:
    """Compile, expected lines, import. Raises AgentError("verification") listing all failures of a kind."""
    files = request["files"]
    _step(emit, "compiling")
    compiled, problems = proofs.compile_tree(where, files)
    if problems:
        what = "does not compile with %s %s; nothing was switched:\n%s"
        text = what % (sys.executable, platform.python_version(), _shorten(problems, "\n"))
        hint = "mend the file, or name a newer Python as `python:` of the host in hosts.yaml"
        raise AgentError("verification", text, request["recipe"], hint)
    _step(emit, "proving")
    found, problems = proofs.check_expect(where, request.get("expect") or [])
    if problems:
        what = "the files are not what the recipe expects; nothing was switched:\n" + _shorten(problems, "\n")
        hint = "mend the file, or `deploy.expect` of the recipe"
        raise AgentError("verification", what, request["recipe"], hint)
    origin = None
    if request.get("entry"):
        origin = proofs.find_module(request["entry"], where, request.get("pythonpath") or "")
        final = release.release_path(request["code_root"], request["release"])
        relative = os.path.relpath(os.path.realpath(origin), os.path.realpath(where))
        origin = os.path.normpath(os.path.join(final, relative))
    return {
        "release": request["release"],
        "verified": len(files),
        "compiled": compiled,
        "python": sys.executable,
        "python_version": platform.python_version(),
        "expect": found,
        "entry": request.get("entry"),
        "imports": origin,
        "to": (request.get("script") or {}).get("to"),
    }


def _name(request: Request, aside: str, final: str, replace: bool) -> None:
    """Give a proven tree its name. From here on it is immutable."""
    body = {key: request.get(key) for key in ("release", "files", "git", "recipe", "entry", "pythonpath")}
    body.update(deployed_at=time.time(), deployed_by=request["who"], python=sys.executable)
    runfolder.write_json(os.path.join(aside, release.MANIFEST), body)
    if replace:
        os.rename(final, os.path.join(os.path.dirname(final), ".old-" + request["id"]))
    os.rename(aside, final)
    runfolder.sync_folder(os.path.dirname(final))


def _shorten(lines: List[str], glue: str = "\n  ") -> str:
    shown = lines[: proofs.MAX_SHOWN]
    more = len(lines) - len(shown)
    return glue.join(shown) + ("%s... and %d more" % (glue, more) if more else "")
