"""Deploy a recipe's files to one host: read facts, plan, send one archive, prove and switch it inside."""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.agent.install import incoming_path
from dflashctl.agent.proofs import compile_source
from dflashctl.config.hosts import Host
from dflashctl.config.recipe import Deploy, Recipe
from dflashctl.errors import DflashError, UsageError, VerificationFailed
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine, Progress
from dflashctl.runs.archive import write_archive
from dflashctl.runs.deployplan import DeployPlan, LocalCompile, plan_deploy
from dflashctl.runs.person import person
from dflashctl.runs.sources import Snapshot, SourceFile, take_snapshot

log = logging.getLogger(__name__)

FACTS_TIMEOUT_S = 60.0
DISCARD_TIMEOUT_S = 10.0
SLOWEST_BYTES_PER_S = 256 * 1024
"""Deadlines of transfers and checks grow with the bytes, at the rate of a poor line."""

ROUNDS = 3
"""How often the far side may ask for contents that it was believed to have."""

Phase = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """What is deployed, to however many hosts: read and compiled once."""

    recipe: Recipe
    deploy: Deploy
    snapshot: Snapshot
    compiled: LocalCompile

    def git(self) -> tuple[dict[str, object] | None, int]:
        """({"commit", "dirty"}, how many deployed files differ from the commit); (None, 0) without git."""
        if self.snapshot.git is None:
            return None, 0
        return self.snapshot.git.describe({file.path for file in self.snapshot.files})


def read_source(recipe: Recipe) -> Source:
    """Read and compile the recipe's files. Raises as take_snapshot and deploy_section do."""
    section = deploy_section(recipe)
    snapshot = take_snapshot(section, recipe.project_root)
    return Source(recipe, section, snapshot, compile_here(snapshot))


@dataclass(frozen=True)
class Deployed:
    """What a deploy did and what was proven; `proof` is the answer of install_release (agent/install.py)."""

    host: Host
    plan: DeployPlan
    git: dict[str, object] | None
    sent_files: int
    archive_bytes: int
    proof: dict[str, Any]
    seconds: float


def compile_here(snapshot: Snapshot) -> LocalCompile:
    """Compile every .py with the Python that runs dflashctl, writing nothing."""
    files = snapshot.python_files()
    problems = [compile_source(snapshot.read(file), file.path) for file in files]
    return LocalCompile(platform.python_version(), len(files), tuple(p for p in problems if p))


def deploy_section(recipe: Recipe) -> Deploy:
    """Raises UsageError for a recipe that only launches."""
    if recipe.deploy is None:
        what = f"recipe {recipe.name} has nothing to deploy"
        raise UsageError(what, where=str(recipe.path), next="add a deploy: section")
    return recipe.deploy


def read_facts(engine: Engine, source: Source, *, prepare: bool) -> dict[str, Any]:
    """One round trip: releases that are there, Python, space."""
    host = engine.host
    want = sorted({file.sha256 for file in source.snapshot.files if file.link is None})
    request = {"code_root": host.code_root, "state_dir": host.state_dir, "want": want, "prepare": prepare}
    return call(engine, "release_facts", request, timeout_s=FACTS_TIMEOUT_S)


def plan(engine: Engine, source: Source, *, prepare: bool = False) -> DeployPlan:
    """Facts and plan; nothing is sent."""
    facts = read_facts(engine, source, prepare=prepare)
    return plan_deploy(source.snapshot, facts, source.compiled)


def deploy(
    engine: Engine,
    source: Source,
    *,
    wait_s: float = 0.0,
    progress: Progress | None = None,
    phase: Phase | None = None,
) -> Deployed:
    """The whole deploy to one host.

    Raises VerificationFailed (nothing switched, nothing left behind), Locked, and what the engine raises.
    """
    started = time.monotonic()
    planned = plan(engine, source, prepare=True)
    git, _ = source.git()
    send = list(planned.send)
    archive_bytes = 0
    for _ in range(ROUNDS):
        answer, sent = _send_and_install(engine, source, send, git, wait_s, progress, phase)
        archive_bytes += sent
        if "missing" not in answer:
            seconds = time.monotonic() - started
            return Deployed(engine.host, planned, git, len(send), archive_bytes, answer, seconds)
        lacking = set(answer["missing"])
        log.debug("the far side lacks %d contents that were believed to be there", len(lacking))
        send += [file for file in source.snapshot.files if file.sha256 in lacking]
    raise VerificationFailed(
        "releases there keep changing while this deploy looks at them; nothing switched", next="deploy again"
    )


def _send_and_install(
    engine: Engine,
    source: Source,
    send: list[SourceFile],
    git: dict[str, object] | None,
    wait_s: float,
    progress: Progress | None,
    phase: Phase | None,
) -> tuple[dict[str, Any], int]:
    deploy_id = secrets.token_hex(8)
    size: int | None = None
    try:
        if send:
            size = _send(engine, source, send, deploy_id, progress)
        request = _install_request(engine.host, source, deploy_id, size, git, wait_s)
        total = sum(file.size for file in source.snapshot.files) + (size or 0)
        timeout_s = 120.0 + wait_s + total / (4 * SLOWEST_BYTES_PER_S)
        answer = call(
            engine,
            "install_release",
            request,
            timeout_s=timeout_s,
            on_event=lambda event: phase(str(event.get("phase", ""))) if phase else None,
        )
    except BaseException:  # Ctrl-C too: install_release removes the archive, but perhaps it never started
        if send:
            _discard(engine, deploy_id)
        raise
    return answer, size or 0


def _send(
    engine: Engine, source: Source, send: list[SourceFile], deploy_id: str, progress: Progress | None
) -> int:
    with tempfile.TemporaryDirectory(prefix="dflashctl-") as folder:
        archive = Path(folder) / "release.tar"
        size = write_archive(source.snapshot, send, archive)
        engine.put(
            archive,
            incoming_path(engine.host.code_root, deploy_id),
            mode=0o600,
            timeout_s=60.0 + size / SLOWEST_BYTES_PER_S,
            progress=progress,
        )
    return size


def _discard(engine: Engine, deploy_id: str) -> None:
    request = {"code_root": engine.host.code_root, "id": deploy_id}
    with contextlib.suppress(DflashError, OSError):  # what stays is swept by a later deploy
        call(engine, "discard_archive", request, timeout_s=DISCARD_TIMEOUT_S)


def _install_request(
    host: Host,
    source: Source,
    deploy_id: str,
    archive_size: int | None,
    git: dict[str, object] | None,
    wait_s: float,
) -> dict[str, Any]:
    search = [env["PYTHONPATH"] for env in (source.recipe.launch.env, host.env) if "PYTHONPATH" in env]
    return {
        "code_root": host.code_root,
        "state_dir": host.state_dir,
        "id": deploy_id,
        "release": source.snapshot.release,
        "files": source.snapshot.manifest(),
        "archive_size": archive_size,
        "keep": host.keep_releases,
        "expect": [row.model_dump() for row in source.deploy.expect],
        "entry": source.deploy.entry,
        "pythonpath": ":".join(search),
        "recipe": source.recipe.name,
        "git": git,
        "who": person(),
        "wait_s": wait_s,
    }
