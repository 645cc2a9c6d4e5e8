"""Signs of life and of trouble in the facts of a run, and the sentences that tell of them. Pure."""

from __future__ import annotations

import re

from dflashctl.config.rules import Rules
from dflashctl.render.text import age, count, plural, ranges
from dflashctl.runs.facts import Family, Heartbeat, Hit, RunFacts


def strong_signs(facts: RunFacts) -> list[str]:
    """What a healthy run does not show: dead threads, a known fatal line."""
    said: list[str] = []
    beat = facts.heartbeat
    if beat is not None and beat.dead_threads:
        said.append(threads_sentence(beat.dead_threads))
    if any(hit.fatal for hit in known_hits(facts)):
        said += log_sentences(facts)
    return said


def weak_signs(facts: RunFacts, rules: Rules) -> list[str]:
    """What may also have harmless reasons."""
    said: list[str] = []
    if facts.heartbeat is not None and full(facts.heartbeat):
        said.append(queues_sentence(facts.heartbeat, empty=False))
    if facts.log is not None and facts.log.exceptions and not any(hit.fatal for hit in known_hits(facts)):
        said += log_sentences(facts)
    if facts.sample_s > 0 and facts.family.count and not busy(facts, rules):
        said.append(cpu_sentence(facts, rules))
    return said


def starved(beat: Heartbeat) -> bool:
    """A queue is empty and none is full: its consumer waits for the producer."""
    return any(depth == 0 for depth, _ in beat.queues.values()) and not full(beat)


def since_step(facts: RunFacts) -> float | None:
    """For how long there has been no step. None when nobody can tell.

    A report's age counts only while the heartbeat is not ahead of it. A phase that began later (an evaluation
    lies between) cuts it short: nobody could make a step before.
    """
    beat, steps = facts.heartbeat, facts.steps
    found = facts.step_seen_age_s
    if steps is not None and (beat is None or beat.step is None or beat.step <= steps.last_step):
        found = max(found or 0.0, steps.age_s)
    if found is None and beat is not None and facts.step in (None, 0):
        found = beat.phase_age_s
    if found is not None and beat is not None and beat.phase_age_s is not None:
        found = min(found, beat.phase_age_s)
    return found


def usual_gap(facts: RunFacts) -> float | None:
    """The usual time between two signs of progress: a step, or a report of several."""
    beat, steps = facts.heartbeat, facts.steps
    known = [
        beat.median_step_s if beat else None,
        steps.median_step_s if steps else None,
        steps.gap_s if steps else None,
    ]
    return max((each for each in known if each), default=None)


def mean_step(facts: RunFacts) -> float | None:
    """Without reports: seconds a step over the run, up to the log's last write."""
    silent, step = quiet(facts), facts.step
    if facts.started_age_s is None or silent is None or not step:
        return None
    return max(facts.started_age_s - silent, 0.0) / step


def quiet(facts: RunFacts) -> float | None:
    return facts.log.quiet_s if facts.log and facts.log.exists else None


def busy(facts: RunFacts, rules: Rules) -> bool:
    """It got CPU time in the sample, or stands in line for it (state R) where there is none to spare."""
    if facts.sample_s <= 0:
        return False
    return facts.family.cpu_s > rules.idle_cpu_share * facts.sample_s or facts.family.states.get("R", 0) > 0


def stopped(family: Family) -> bool:
    alive = {state: number for state, number in family.states.items() if state not in ("Z", "X")}
    return bool(alive) and set(alive) <= {"T", "t"}


def full(beat: Heartbeat) -> bool:
    return any(0 < size <= depth for depth, size in beat.queues.values())


def step_sentence(facts: RunFacts) -> str:
    beat = facts.heartbeat
    total = f" of {count(beat.total_steps)}" if beat is not None and beat.total_steps else ""
    usual = usual_gap(facts)
    each = f", {age(usual)} each" if usual else ""
    if facts.steps and facts.steps.median_step_s:
        each = f", {age(facts.steps.median_step_s)} each"
    return f"step {count(facts.step)}{total}{each}"


def threads_sentence(names: tuple[str, ...]) -> str:
    """ "3 drafter threads gone" where the names differ by a number alone, else the names."""
    stems = {re.sub(r"[-_.\s]*\d+$", "", name) for name in names}
    if len(stems) == 1 and "" not in stems:
        return f"{plural(len(names), f'{stems.pop()} thread')} gone"
    return f"{plural(len(names), 'thread')} gone: {', '.join(names)}"


def queues_sentence(beat: Heartbeat, *, empty: bool) -> str:
    wanted = {
        name: (depth, size)
        for name, (depth, size) in beat.queues.items()
        if (depth == 0 if empty else 0 < size <= depth)
    }
    word = "empty" if empty else "full"
    return ", ".join(f"queue {name} {word} ({depth} of {size})" for name, (depth, size) in wanted.items())


def cpu_sentence(facts: RunFacts, rules: Rules) -> str:
    family = facts.family
    if facts.sample_s <= 0:
        return f"{plural(family.count, 'process', 'processes')}"
    if busy(facts, rules):
        if family.cpu_s <= rules.idle_cpu_share * facts.sample_s:
            return f"no CPU time in {age(facts.sample_s)}, but it stands in line for it (state R)"
        return f"{100 * family.cpu_s / facts.sample_s:.0f} % of a core busy"
    biggest = next(iter(family.processes), None)
    state = f" (state {biggest.state}{f' in {biggest.wchan}' if biggest.wchan else ''})" if biggest else ""
    return f"no CPU time in {age(facts.sample_s)}{state}"


def gpus_sentence(facts: RunFacts) -> str:
    loads = [gpu.utilization_pct for gpu in facts.gpus if gpu.utilization_pct is not None]
    held = ranges([gpu.index for gpu in facts.gpus])
    if not loads:
        return f"GPU {held}: no answer about its load"
    span = f"{min(loads)} %" if min(loads) == max(loads) else f"{min(loads)}-{max(loads)} %"
    return f"GPU {held} at {span}, which alone proves nothing"


def known_hits(facts: RunFacts) -> list[Hit]:
    """Known failures in the log, fatal ones first."""
    hits = facts.log.known if facts.log else ()
    return sorted(hits, key=lambda hit: not hit.fatal)


def explained(facts: RunFacts) -> bool:
    """Has `dflashctl explain` more to say than that nothing is known?"""
    return bool(known_hits(facts) or facts.root_cause_known)


def known_cause_sentence(facts: RunFacts) -> str:
    """What the program's own root cause is known as: the first of them, the first sentence of its meaning."""
    cause = facts.root_cause_known[0]
    meaning = cause.meaning.partition(". ")[0].rstrip(".")
    return f"known failure {cause.name}: {meaning} (dflashctl explain {facts.name})"


def log_sentences(facts: RunFacts) -> list[str]:
    """What the log says about trouble: the first known failure, or else the first exception; how many."""
    log = facts.log
    if log is None:
        return []
    hits = known_hits(facts)
    said = [known_sentence(hits[0], facts)] if hits else []
    first = log.first_exception
    if not hits and first is not None:
        said.append(f"{_line(first)}: {first.text}")
    if log.exceptions > 1:
        said.append(f"{log.exceptions:,} exceptions in the log")
    return said


def known_sentence(hit: Hit, facts: RunFacts) -> str:
    first = facts.log.first_exception if facts.log else None
    # The exception's own line says more than the source line that the pattern found just above it.
    near = (
        first is not None
        and first.line is not None
        and hit.line is not None
        and 0 <= first.line - hit.line <= 3
    )
    shown = first if near and first is not None else hit
    return f"{_line(shown)}: {shown.text} (known: dflashctl explain {facts.name})"


def _line(hit: Hit) -> str:
    return "log" if hit.line is None else f"log line {hit.line:,}"
