"""Past and present runs as the container remembers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.render.secrets import hide_sounding
from dflashctl.render.text import commit
from dflashctl.runs import known
from dflashctl.runs.facts import RunFacts, listed, mapping, number, text, whole
from dflashctl.runs.readfacts import read_answer
from dflashctl.runs.verdict import Verdict, told

TIMEOUT_S = 40.0
MOST = 10_000
PRUNE_TIMEOUT_S = 600.0
"""Checkpoints are large, and some file systems slow."""


@dataclass(frozen=True)
class Entry:
    """One run of the list."""

    facts: RunFacts
    verdict: Verdict
    created_at: float | None
    lossless: bool | None = None
    best_acceptance_length: float | None = None
    note: str = ""
    """The newest of those that people wrote."""

    @property
    def took_s(self) -> float | None:
        """From start to end, or until now."""
        ending = self.facts.ending
        if ending is not None:
            return ending.wall_s
        return None if self.verdict.ended else self.facts.started_age_s

    @property
    def code(self) -> str:
        """`7f3a91c2 (git 1c9e4d0, changed)`: what ran."""
        release, git = text(self.facts.record.get("release")), commit(mapping(self.facts.record.get("git")))
        origin = f" (git {git})" if git else ""
        return f"{release[:8]}{origin}" if release else "-"


@dataclass(frozen=True)
class History:
    host: str
    entries: tuple[Entry, ...]
    total: int
    damaged: tuple[tuple[str, str], ...] = ()
    """(run id, what is wrong with its files)."""
    wanted: str = ""
    """By what it was chosen, in words: "of tag a in state failed"."""


@dataclass(frozen=True)
class Shown:
    """Everything about one run; `detail` as the agent's operation describes it."""

    host: str
    entry: Entry
    detail: Mapping[str, Any] = field(default_factory=dict)


def list_runs(
    engine: Engine, *, limit: int, tag: str | None = None, recipe: str | None = None, state: str | None = None
) -> History:
    """The newest runs first, live ones among them. A state is judged here, so all runs are asked for then."""
    asked = limit if state is None else MOST
    request = {
        "state_dir": engine.host.state_dir,
        "limit": asked,
        "tag": tag,
        "recipe": recipe,
        "known": known.patterns(),
    }
    answer = call(engine, "list_runs", request, timeout_s=TIMEOUT_S)
    damaged = [mapping(each) for each in listed(answer.get("damaged"))]
    found = [each for each in entries(answer) if state is None or each.verdict.state == state]
    return History(
        engine.host.name,
        tuple(found[:limit]),
        whole(answer.get("total")) or 0,
        tuple((text(each.get("id")), text(each.get("problem"))) for each in damaged),
        " ".join(
            f"{word} {value}"
            for word, value in (("of tag", tag), ("of recipe", recipe), ("in state", state))
            if value is not None
        ),
    )


def show_run(engine: Engine, name: str | None) -> Shown:
    """A run by tag or id; the newest one for None. Raises NotFound."""
    request = {"code_root": engine.host.code_root, "one": True, "known": known.patterns()}
    answer = _by_name(engine, "list_runs", request, name)
    detail = mapping(answer.get("detail"))
    hide_sounding(mapping(mapping(detail.get("record")).get("env")))  # a report is for others' eyes
    return Shown(engine.host.name, entries(answer)[0], detail)


def entries(answer: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Runs of an answer, judged."""
    made = []
    for facts, raw in zip(read_answer(answer), map(mapping, listed(answer.get("runs"))), strict=True):
        summary = mapping(raw.get("summary"))
        lossless = summary.get("lossless")
        made.append(
            Entry(
                facts,
                told(facts),
                number(facts.record.get("created_at")),
                lossless if isinstance(lossless, bool) else None,
                number(summary.get("best_acceptance_length")),
                text(mapping((listed(raw.get("notes")) or [None])[-1]).get("text")),
            )
        )
    return tuple(made)


def add_note(engine: Engine, name: str, note: str, who: str) -> Mapping[str, Any]:
    """Append what was learnt to a run's events, by tag or id. Raises NotFound, UsageError (an empty note)."""
    from dflashctl.errors import UsageError

    if not note.strip():
        raise UsageError("the note is empty", next=f"dflashctl runs note {name} 'what was learnt'")
    return _by_name(engine, "note_run", {"text": note.strip(), "who": who}, name)


def repair(engine: Engine, name: str | None, who: str, *, dry_run: bool) -> Mapping[str, Any]:
    """Make damaged files of runs that are over readable again, of one run or of all; the answer as the
    agent's operation describes it. Raises NotFound."""
    return _by_name(engine, "repair_runs", {"who": who, "dry_run": dry_run}, name)


def _by_name(engine: Engine, op: str, request: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Ask about a run by tag, or by id where nothing has the tag. Raises NotFound, of the tag."""
    from dflashctl.errors import NotFound

    asked = {"state_dir": engine.host.state_dir, **request}
    try:
        return call(engine, op, {**asked, "tag": name}, timeout_s=TIMEOUT_S)
    except NotFound as no_such_tag:
        if name is None:
            raise
        try:
            return call(engine, op, {**asked, "id": name}, timeout_s=TIMEOUT_S)
        except NotFound:
            raise no_such_tag from None


def prune(engine: Engine, *, keep: int, older_than_s: float | None, dry_run: bool) -> Mapping[str, Any]:
    """Remove ended runs by rules; the answer as the agent's operation describes it."""
    request = {
        "state_dir": engine.host.state_dir,
        "keep": keep,
        "older_than_s": older_than_s,
        "dry_run": dry_run,
    }
    return call(engine, "prune_runs", request, timeout_s=PRUNE_TIMEOUT_S)
