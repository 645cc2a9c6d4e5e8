"""The releases of a host: list them, go back to one; and the deploy lock: who holds it, and breaking it."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from dflashctl.config.hosts import Host
from dflashctl.errors import UsageError
from dflashctl.person import person
from dflashctl.releases.deploy import INNER_WAIT_S
from dflashctl.releases.desk import Desk, Phase
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine

FACTS_TIMEOUT_S = 60.0
ROLLBACK_TIMEOUT_S = 600.0
BREAK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ReleaseRow:
    """One release as it is there."""

    release: str
    states: tuple[str, ...]
    age_s: float | None
    facts: dict[str, Any]

    def payload(self) -> dict[str, Any]:
        return {**self.facts, "states": list(self.states), "age_s": self.age_s}


def check_name(release: str | None) -> str | None:
    """A beginning of a release's name, as people copy it. Raises UsageError for anything else."""
    if release is not None and not re.fullmatch(r"[0-9a-f]{4,64}", release):
        raise UsageError(
            f"{release!r} is not a release: 4 to 64 hexadecimal digits", next="dflashctl releases lists them"
        )
    return release


def read_releases(engine: Engine) -> dict[str, Any]:
    """Facts of agent/releases/install.py's release_facts; changes nothing."""
    host = engine.host
    request = {"code_root": host.code_root, "state_dir": host.state_dir, "prepare": None}
    return call(engine, "release_facts", request, timeout_s=FACTS_TIMEOUT_S)


def overview(facts: dict[str, Any]) -> list[ReleaseRow]:
    """Newest first. Ages are told by the container's clock alone: the laptop's may be wrong."""
    rows = []
    for row in facts["releases"]:
        name, at = row["release"], row.get("deployed_at")
        states = [word for word in ("current", "previous") if facts[word] == name]
        states += [f"script {to}" for to in row.get("to") or ()]
        if name in facts["pinned"]:
            states.append(f"used by run {facts['pinned'][name]}")
        if row.get("problem"):
            states.append(f"damaged: {row['problem']}")
        age_s = float(facts["now"]) - float(at) if isinstance(at, int | float) else None
        rows.append(ReleaseRow(name, tuple(states), age_s, row))
    return sorted(rows, key=lambda row: (row.age_s is None, row.age_s or 0.0))


def roll_back(
    engine: Engine, release: str | None, *, wait_s: float, dry_run: bool, phase: Phase | None = None
) -> dict[str, Any]:
    """Prove an older release again and make it current; the answer is of agent/releases/switching.py.

    Raises NotFound, VerificationFailed (it was changed in place), Locked.
    """
    host = engine.host
    request = {
        "code_root": host.code_root,
        "state_dir": host.state_dir,
        "id": secrets.token_hex(8),
        "release": release,
        "who": person(),
        "wait_s": INNER_WAIT_S,
        "dry_run": dry_run,
    }
    if dry_run:
        return call(engine, "roll_back", request, timeout_s=ROLLBACK_TIMEOUT_S)
    what = f"rollback to {release[:8] if release else 'the one before'}"
    with Desk(engine, what, wait_s=wait_s, phase=phase) as desk:
        desk.check()
        return call(
            engine,
            "roll_back",
            request,
            timeout_s=ROLLBACK_TIMEOUT_S,
            on_event=lambda event: phase(str(event.get("phase", ""))) if phase else None,
        )


def show_lock(engine: Engine) -> dict[str, Any]:
    """{"path", "holder": {...}|null}, from the machine that has the lock."""
    return call(engine, "lock_show", _lock_request(engine), where="host", timeout_s=FACTS_TIMEOUT_S)


def break_lock(engine: Engine, holder: dict[str, Any]) -> dict[str, Any]:
    """End the process that holds the lock, as `show_lock` told it. Raises Locked when it cannot be told, is
    another one by now, or does not go."""
    request = {**_lock_request(engine), "by": person(), "holder": holder}
    return call(engine, "lock_break", request, where="host", timeout_s=BREAK_TIMEOUT_S)


def _lock_request(engine: Engine) -> dict[str, Any]:
    host: Host = engine.host
    return {
        "container": host.container if engine.has_separate_host else None,
        "code_root": host.code_root,
    }
