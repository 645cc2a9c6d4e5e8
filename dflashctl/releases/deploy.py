"""Deploy a recipe's files to one host: read facts, plan, send one archive, prove and switch it inside."""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
import time
from dataclasses import dataclass
from typing import Any

from dflashctl.agent.releases.install import incoming_path
from dflashctl.agent.releases.proofs import compile_source
from dflashctl.config.hosts import Host
from dflashctl.config.recipe import Deploy, Recipe
from dflashctl.errors import DflashError, UsageError, VerificationFailed
from dflashctl.person import person
from dflashctl.releases.archive import pack
from dflashctl.releases.deployplan import DeployPlan, LocalCompile, plan_deploy
from dflashctl.releases.desk import Desk, Phase
from dflashctl.releases.sources import Snapshot, SourceFile, take_snapshot
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine, Progress

log = logging.getLogger(__name__)

FACTS_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 10.0
INNER_WAIT_S = 10.0
"""The lock on the host is ours by then; inside, an interrupted deploy may still be on its way out."""
SLOWEST_BYTES_PER_S = 256 * 1024
"""Deadlines of transfers and checks grow with the bytes, at the rate of a poor line."""

ROUNDS = 3
"""How often the far side may ask for contents that it was believed to have."""


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
    """What a deploy did and what was proven; `proof` is the answer of agent/releases/install.py."""

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


def read_facts(
    engine: Engine, source: Source, *, prepare: bool, install: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One round trip: releases that are there, Python, space. With `install`, a release that is there already
    is proven and made current in the same one."""
    host = engine.host
    want = sorted({file.sha256 for file in source.snapshot.files if file.link is None})
    request = {
        "code_root": host.code_root,
        "state_dir": host.state_dir,
        "script": source.deploy.script(),
        "want": want,
        "prepare": prepare,
        "install": install,
    }
    timeout_s = FACTS_TIMEOUT_S + (_seconds_for(source) if install else 0.0)
    return call(engine, "release_facts", request, timeout_s=timeout_s)


def plan(engine: Engine, source: Source) -> DeployPlan:
    """Facts and plan; nothing is sent, made or locked."""
    return plan_deploy(source.snapshot, read_facts(engine, source, prepare=False), source.compiled)


def deploy(
    engine: Engine,
    source: Source,
    *,
    wait_s: float = 0.0,
    progress: Progress | None = None,
    phase: Phase | None = None,
) -> Deployed:
    """The whole deploy to one host, under its lock. Without a change it takes two remote commands (the host's
    desk, and the facts with the proof), with one three (and the install).

    Raises VerificationFailed (nothing switched, nothing left behind), Locked, and what the engine raises. A
    KeyboardInterrupt carries a note that says what is current now.
    """
    started = time.monotonic()
    what = f"{source.recipe.name} {source.snapshot.release[:8]}"
    work = _Work(engine, source, progress, phase)
    budget_s = FACTS_TIMEOUT_S + ROUNDS * 3 * _seconds_for(source)
    try:
        with Desk(engine, what, wait_s=wait_s, budget_s=budget_s, phase=phase) as desk:
            planned, sent_files, archive_bytes, proof = work.run(desk)
    except KeyboardInterrupt as stop:
        stop.add_note(work.after_interrupt())
        raise
    seconds = time.monotonic() - started
    return Deployed(engine.host, planned, source.git()[0], sent_files, archive_bytes, proof, seconds)


class _Work:
    """What is done while the lock is held."""

    def __init__(
        self, engine: Engine, source: Source, progress: Progress | None, phase: Phase | None
    ) -> None:
        self._engine = engine
        self._source = source
        self._progress = progress
        self._phase = phase
        self._installing = False

    def run(self, desk: Desk) -> tuple[DeployPlan, int, int, dict[str, Any]]:
        """(plan, files sent, bytes sent, proof)."""
        source = self._source
        at_once = install_request(self._engine.host, source, secrets.token_hex(8), None)
        self._installing = True  # only of what is there
        facts = read_facts(self._engine, source, prepare=True, install=at_once)
        self._installing = False
        planned = plan_deploy(source.snapshot, facts, source.compiled)
        if "proof" in facts:
            return planned, 0, 0, facts["proof"]
        send, archive_bytes = list(planned.send), 0
        for _ in range(ROUNDS):
            answer, sent = self._send_and_install(desk, send)
            archive_bytes += sent
            if "missing" not in answer:
                return planned, len(send), archive_bytes, answer
            lacking = set(answer["missing"])
            log.debug("the far side lacks %d contents that were believed to be there", len(lacking))
            send += [file for file in source.snapshot.files if file.sha256 in lacking]
        raise VerificationFailed(
            "releases there keep changing while this deploy looks at them; nothing switched",
            next="deploy again",
        )

    def _send_and_install(self, desk: Desk, send: list[SourceFile]) -> tuple[dict[str, Any], int]:
        host, deploy_id = self._engine.host, secrets.token_hex(8)
        size, said = None, ""
        if send:
            archive = pack(self._source.snapshot, send)
            size = archive.size
            said = desk.deliver(
                archive.pieces,
                size,
                incoming_path(host.code_root, deploy_id),
                mode=0o600,
                timeout_s=2 * _seconds_for(self._source),
                progress=self._progress,
            )
        desk.check()
        self._installing = True
        try:
            answer = call(
                self._engine,
                "install_release",
                install_request(host, self._source, deploy_id, size),
                timeout_s=_seconds_for(self._source),
                on_event=self._event,
            )
        except VerificationFailed as error:
            if said:  # pct's own word about a push that failed and exited with 0
                raise VerificationFailed(
                    f"{error.what} (pct: {said})", where=error.where, next=error.next
                ) from error
            raise
        return answer, size or 0

    def _event(self, event: dict[str, Any]) -> None:
        if self._phase:
            self._phase(str(event.get("phase", "")))

    def after_interrupt(self) -> str:
        """What a Ctrl-C came to, asked inside when it fell into an install."""
        release = self._source.snapshot.release
        if not self._installing:
            return "nothing was switched; deploy again when you like"
        with contextlib.suppress(DflashError, OSError, KeyboardInterrupt):
            host = self._engine.host
            request = {
                "code_root": host.code_root,
                "state_dir": host.state_dir,
                "script": self._source.deploy.script(),
                "prepare": None,
            }
            facts = call(self._engine, "release_facts", request, timeout_s=ASK_TIMEOUT_S)
            if facts["current"] == release:
                return f"it was switched already: release {release[:8]} is current"
            return f"nothing was switched: release {(facts['current'] or 'none')[:8]} is current"
        return "whether it was switched is not known: `dflashctl releases` tells"


def _seconds_for(source: Source) -> float:
    """The deadline of one step: it grows with the bytes."""
    total = sum(file.size for file in source.snapshot.files)
    return 120.0 + total / SLOWEST_BYTES_PER_S


def install_request(host: Host, source: Source, deploy_id: str, archive_size: int | None) -> dict[str, Any]:
    """The request of agent/releases/install.py's install_release."""
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
        "script": source.deploy.script(),
        "pythonpath": ":".join(search),
        "recipe": source.recipe.name,
        "git": source.git()[0],
        "who": person(),
        "wait_s": INNER_WAIT_S,
    }
