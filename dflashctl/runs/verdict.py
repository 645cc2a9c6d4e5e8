"""Facts -> verdict: is it idle, working, or locked up? One pure function, `judge`.

Its table of cases is tests/unit/test_verdict_table.py. Principles, in the order in which they win:

  no contact is `unknown`, never `failed`; missing evidence changes no state
  a frozen container is `frozen`; a rebooted one, or a supervisor gone without a trace, makes a run `lost`
  an exit record says how it ended
  what is alive is judged by several signs (alive.py); a GPU at 100 % or 0 % alone proves nothing
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from signal import SIGKILL

from dflashctl.config.rules import Rules
from dflashctl.render.hints import complete
from dflashctl.render.text import age, duration, plural, size
from dflashctl.runs.alive import judge_alive
from dflashctl.runs.ending import signal_name
from dflashctl.runs.facts import Ending, RunFacts
from dflashctl.runs.signs import explained, known_cause_sentence, known_hits, known_sentence, log_sentences
from dflashctl.runs.vocabulary import BAD, ENDED, Confidence, State, Verdict

__all__ = ["BAD", "ENDED", "Confidence", "Rules", "State", "Verdict", "judge", "told"]


def judge(facts: RunFacts, rules: Rules | None = None) -> Verdict:
    """The verdict on one run, by the thresholds of its recipe unless others are given."""
    for rule in _BEFORE_ALIVE:
        verdict = rule(facts)
        if verdict is not None:
            return verdict
    return judge_alive(facts, rules or Rules.of(facts.rules))


def told(facts: RunFacts) -> Verdict:
    """`judge`, in words for the person who asked: commands name the host that they named."""
    verdict = judge(facts)
    evidence, next = tuple(map(complete, verdict.evidence)), tuple(map(complete, verdict.next))
    return replace(verdict, evidence=evidence, next=next)


def _no_contact(facts: RunFacts) -> Verdict | None:
    if facts.contact == "ok":
        return None
    seen = (f"last seen {facts.last_seen} {age(facts.last_seen_age_s)} ago",) if facts.last_seen else ()
    reason = (facts.contact_detail,) if facts.contact_detail else ()
    if facts.contact == "frozen":
        return Verdict(
            "frozen", "high", ("its container is frozen: nothing in it runs until it is thawed", *seen)
        )
    if facts.contact == "stopped":
        what = "its container is stopped; how the run ended is known once it is started again"
        return Verdict("unknown", "low", (what, *seen))
    return Verdict("unknown", "low", ("no contact, so nothing is known of its state", *reason, *seen))


def _unreadable(facts: RunFacts) -> Verdict | None:
    if facts.recorded:
        return None
    why = facts.problems or ("its record.json is missing",)
    return Verdict("unknown", "low", ("its record cannot be read", *why))


def _ended(facts: RunFacts) -> Verdict | None:
    ending = facts.ending
    if ending is None:
        if facts.cancelled:
            return Verdict("cancelled", "high", ("cancelled before it started",))
        return None
    state, how = _how(ending, facts)
    details = []
    if state == "failed":
        details += [*_cause(facts)]
    if ending.wall_s is not None and ending.cause != "spawn_failed":
        details.append(f"ran {duration(ending.wall_s)}" + _peak(ending))
    if facts.headline:
        # What was learnt comes before how long it took.
        details.insert(0, facts.headline)
    said = tuple(_brief(each) for each in (how, *details))
    return Verdict(state, "high", said, _next_ended(state, facts), ending.age_s)


def _brief(words: str) -> str:
    """One line of a message of a program, releases (and other sha256) as people name them: by 8 digits."""
    first = next((each for each in words.splitlines() if each.strip()), "").strip()
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1", first)


def _how(ending: Ending, facts: RunFacts) -> tuple[State, str]:
    """State and first sentence of an ended run."""
    if ending.cause == "spawn_failed":
        return "failed", f"it could not be started: {ending.why or 'no reason was recorded'}"
    if ending.cause == "killed":
        by = f" by {ending.killed_by}" if ending.killed_by else ""
        # A person's words are all told: of a program's message the first line is.
        reason = f" ({' '.join(ending.reason.split())})" if ending.reason else ""
        return "killed", f"killed{by}{reason}"
    if ending.oom:
        return "failed", "ended by the out-of-memory killer"
    if ending.signal is not None:
        perhaps = _perhaps_oom(ending) if ending.signal == SIGKILL else ""
        return "failed", f"ended by {signal_name(ending.signal)}, which dflashctl did not send{perhaps}"
    if ending.code == 0 and facts.root_cause:
        return "failed", "exit code 0, but the program left a root cause"
    if ending.code == 0:
        return "finished", "exit code 0"
    if ending.code is None:
        return "failed", "it ended, and neither code nor signal was recorded"
    return "failed", f"exit code {ending.code}"


def _perhaps_oom(ending: Ending) -> str:
    """What the machine's counter says of a SIGKILL where no memory cgroup counts: it names no victim."""
    if ending.oom_kills is not None:
        return ""
    machine = ending.oom_kills_machine
    if machine == 0:
        return "; nor did the kernel's out-of-memory killer strike on this machine meanwhile"
    where = "the host's `dmesg` names its victims"
    if machine is None:
        return f"; perhaps the kernel's out-of-memory killer did, which nothing here counts: {where}"
    times = plural(machine, "time")
    return f"; the kernel's out-of-memory killer struck {times} on this machine meanwhile: {where}"


def _cause(facts: RunFacts) -> list[str]:
    """Why it failed: what the kernel did to its workers, the program's own word, its log."""
    struck = facts.ending.oom_kills if facts.ending else None
    if struck and facts.ending and not facts.ending.oom:
        said = f"the out-of-memory killer struck {plural(struck, 'time')} in its container meanwhile"
        return [said, *_own_cause(facts)]
    return _own_cause(facts)


def _own_cause(facts: RunFacts) -> list[str]:
    if not facts.root_cause:
        return log_sentences(facts)
    if facts.root_cause_known:
        return [facts.root_cause, known_cause_sentence(facts)]
    return [facts.root_cause, *(known_sentence(hit, facts) for hit in known_hits(facts)[:1])]


def _peak(ending: Ending) -> str:
    return f", at most {size(ending.peak_rss_bytes)} of main memory" if ending.peak_rss_bytes else ""


def _never_started(facts: RunFacts) -> Verdict | None:
    if facts.supervisor_recorded:
        return None
    if facts.queued:
        return Verdict("queued", "high", ("waiting for its GPUs",), for_s=facts.created_age_s)
    waited = facts.created_age_s
    if facts.rebooted:
        return Verdict("lost", "high", ("the container was restarted before the run had started",))
    if waited is None or waited <= facts.started_within_s:
        what = f"launched {age(waited)} ago; its supervisor has not reported yet"
        return Verdict("starting", "medium", (what,), for_s=waited)
    what = f"launched {age(waited)} ago, and no supervisor ever reported: the launch was cut off"
    return Verdict("lost", "high", (what,), (f"dflashctl launch --tag {facts.name}",))


def _lost(facts: RunFacts) -> Verdict | None:
    if facts.rebooted:
        what = "the container was restarted under it: its processes are gone, how far it came is in its log"
        return Verdict("lost", "high", (what, *_last_progress(facts)), _next_ended("lost", facts))
    if facts.supervisor_alive:
        return None
    if facts.family.count:
        left = plural(facts.family.count, "process", "processes")
        what = f"its supervisor is gone, and {left} of it still live"
        why = "their end will not be recorded, and nobody ends the rest when one dies"
        return Verdict("lost", "high", (what, why, *_last_progress(facts)), (f"dflashctl kill {facts.name}",))
    what = "its supervisor and its processes are gone without an exit record"
    return Verdict(
        "lost", "high", (what, *_last_progress(facts), *log_sentences(facts)), _next_ended("lost", facts)
    )


def _last_progress(facts: RunFacts) -> list[str]:
    return [] if facts.step is None else [f"its last reported step is {facts.step:,}"]


_BEFORE_ALIVE: tuple[Callable[[RunFacts], Verdict | None], ...] = (
    _no_contact,
    _unreadable,
    _ended,
    _never_started,
    _lost,
)


def _next_ended(state: State, facts: RunFacts) -> tuple[str, ...]:
    if state == "finished":
        return (f"dflashctl runs show {facts.name}",)
    if state in ("failed", "lost"):
        explain = (f"dflashctl explain {facts.name}",) if explained(facts) else ()
        return (*explain, f"dflashctl logs {facts.name}")
    return ()
