"""The part of the verdict that needs judgement: a run whose supervisor lives. Pure."""

from __future__ import annotations

from dflashctl.config.rules import Rules
from dflashctl.render.text import age, plural
from dflashctl.runs import signs
from dflashctl.runs.facts import Heartbeat, RunFacts
from dflashctl.runs.signs import known_hits, log_sentences
from dflashctl.runs.vocabulary import Confidence, State, Verdict

STARTING_PHASES = frozenset({"loading", "data"})


def judge_alive(facts: RunFacts, rules: Rules) -> Verdict:
    """starting, compiling, running, slow or wedged."""
    if signs.stopped(facts.family):
        what = "every process of it is stopped (state T): somebody sent SIGSTOP"
        return _verdict(facts, "wedged", "high", [what], signs.quiet(facts))
    if facts.family.count == 0 or not facts.leader_alive:
        return _ending(facts)
    if facts.heartbeat is None:
        return _without_heartbeat(facts, rules)
    if facts.heartbeat.age_s > deadline(facts.heartbeat, rules):
        return _stale(facts, facts.heartbeat, rules)
    return _beating(facts, facts.heartbeat, rules)


def deadline(beat: Heartbeat, rules: Rules) -> float:
    """How old this heartbeat may become: the program says so, for each phase."""
    return (
        beat.deadline_s if beat.deadline_s is not None and beat.deadline_s > 0 else rules.heartbeat_deadline_s
    )


# --- with a heartbeat ------------------------------------------------------------------------------------


def _beating(facts: RunFacts, beat: Heartbeat, rules: Rules) -> Verdict:
    """The program is heard. Whether it gets anywhere is another question."""
    strong = signs.strong_signs(facts)
    alive = f"heartbeat {age(beat.age_s)} old"
    if beat.phase == "compiling" or beat.phase in STARTING_PHASES:
        state: State = "compiling" if beat.phase == "compiling" else "starting"
        what = f"{beat.phase} for {age(beat.phase_age_s)}"
        if beat.dead_threads and (beat.phase_age_s or 0) > rules.weak_min_s:
            return _verdict(facts, "wedged", "medium", [*strong, what, alive], beat.phase_age_s)
        if (beat.phase_age_s or 0) > rules.long_phase_s:
            return _verdict(facts, "slow", "medium", [what, alive, *strong], beat.phase_age_s)
        return _verdict(
            facts, state, "medium" if strong else "high", [what, alive, *strong], beat.phase_age_s
        )
    if beat.phase != "training":
        what = f"{beat.phase} for {age(beat.phase_age_s)}"
        if beat.dead_threads and (beat.phase_age_s or 0) > rules.alone_min_s:
            return _verdict(facts, "wedged", "medium", [*strong, what, alive], beat.phase_age_s)
        late = (beat.phase_age_s or 0) > rules.long_phase_s
        return _verdict(
            facts, "slow" if late else "running", "medium" if strong else "high", [what, *strong, alive]
        )
    return _training(facts, beat, strong, alive, rules)


def _training(facts: RunFacts, beat: Heartbeat, strong: list[str], alive: str, rules: Rules) -> Verdict:
    pause, usual = signs.since_step(facts), signs.usual_gap(facts)
    if usual is None and strong and pause is not None and pause > rules.strong_min_s:
        weak = signs.weak_signs(facts, rules)
        never = f"no step since training began {age(pause)} ago"
        return _verdict(facts, "wedged", "high", [never, *strong, *weak], pause)
    if pause is None or usual is None:
        said = (
            [signs.step_sentence(facts), alive, *strong]
            if facts.step is not None
            else [f"training, {alive}", *strong]
        )
        return _verdict(facts, "running", "medium", said)
    late = f"no step for {age(pause)} (median {age(usual)})"
    patience = rules.starved_patience if signs.starved(beat) and not strong else 1.0
    weak = signs.weak_signs(facts, rules)
    if strong and pause > max(rules.strong_factor * usual, rules.strong_min_s):
        return _verdict(facts, "wedged", "high", [late, *strong, *weak], pause)
    if weak and pause > patience * max(rules.weak_factor * usual, rules.weak_min_s):
        sure: Confidence = "high" if len(weak) > 1 else "medium"
        return _verdict(facts, "wedged", sure, [late, *weak, f"though its {alive}"], pause)
    if pause > patience * max(rules.alone_factor * usual, rules.alone_min_s):
        return _verdict(facts, "wedged", "medium", [late, f"though its {alive}"], pause)
    if pause > max(rules.slow_factor * usual, rules.slow_min_s):
        waits = (
            ["waiting for input: " + signs.queues_sentence(beat, empty=True)] if signs.starved(beat) else []
        )
        return _verdict(facts, "slow", "medium", [late, *waits, *strong, *weak, alive], pause)
    steps = facts.steps
    if steps and steps.recent_step_s and steps.median_step_s:
        factor = steps.recent_step_s / steps.median_step_s
        if factor > rules.slow_factor:
            what = f"a step takes {age(steps.recent_step_s)} now, {age(steps.median_step_s)} over the run"
            return _verdict(facts, "slow", "medium", [what, *strong, alive])
    return _verdict(
        facts, "running", "medium" if strong else "high", [signs.step_sentence(facts), alive, *strong]
    )


def _stale(facts: RunFacts, beat: Heartbeat, rules: Rules) -> Verdict:
    """Nothing heard for longer than the program itself allowed."""
    late = (
        f"no heartbeat for {age(beat.age_s)} in phase {beat.phase} (it allows {age(deadline(beat, rules))})"
    )
    strong, weak = signs.strong_signs(facts), signs.weak_signs(facts, rules)
    usual, log = signs.usual_gap(facts), facts.log
    stepping = facts.steps is not None and usual is not None and facts.steps.age_s < rules.slow_factor * usual
    if stepping or (log is not None and (log.grown or 0) > 0 and not strong):
        what = "but steps are still reported" if stepping else "but its log grows"
        return _verdict(facts, "slow", "low", [late, what, *strong], beat.age_s)
    sure = bool(strong or weak) or beat.age_s > 3 * deadline(beat, rules)
    return _verdict(facts, "wedged", "high" if sure else "medium", [late, *strong, *weak], beat.age_s)


# --- without one -----------------------------------------------------------------------------------------


def _without_heartbeat(facts: RunFacts, rules: Rules) -> Verdict:
    """A program of any kind: its log, its CPU time, and the recipe's step_regex where there is one."""
    log, silent, started = facts.log, signs.quiet(facts), facts.started_age_s
    if started is not None and started < rules.fresh_s and not (log and log.size):
        return _verdict(facts, "starting", "medium", [f"started {age(started)} ago"], started)
    stepping = facts.step is not None
    basis = f"no heartbeat: judged by {'the steps in its log' if stepping else 'its log'} and CPU time alone"
    cpu, trouble = signs.cpu_sentence(facts, rules), log_sentences(facts)
    step = [signs.step_sentence(facts)] if stepping else []
    if silent is None:
        return _verdict(facts, "running", "low", [cpu, "it has no log", basis])
    # After a line that announces a long silence, the usual step measures nothing.
    usual = None if facts.announced else signs.mean_step(facts)
    announced = [f"its log announces a pause: {facts.announced}"] if facts.announced else []
    late = f"its log is silent for {age(silent)}"
    if usual is not None:
        late = f"no step for at least {age(silent)} (usually {age(usual)})"
    if silent > rules.log_deadline_s and not facts.announced:
        late = f"{late} (the recipe allows {age(rules.log_deadline_s)})"
        return _verdict(facts, "wedged", "medium", [late, *trouble, *step, cpu, basis], silent)
    slow_s, wedged_s, sure = _patience(facts, usual, rules)
    if silent > wedged_s:
        return _verdict(facts, "wedged", sure, [late, *trouble, *announced, *step, cpu, basis], silent)
    if silent > slow_s:
        return _verdict(facts, "slow", "low", [late, *trouble, *announced, *step, cpu, basis], silent)
    wrote = "its log grows" if log and log.grown else f"its log was written {age(silent)} ago"
    seen = facts.step_seen_age_s
    if usual is not None and seen is not None and seen > max(rules.alone_factor * usual, rules.alone_min_s):
        # What it writes may be an evaluation, or the complaints of a run that is stuck.
        late = f"step {facts.step:,} for {age(seen)} (usually {age(usual)}), though {wrote}"
        return _verdict(facts, "slow", "low", [late, *trouble, cpu, basis], seen)
    recent = silent < rules.quiet_s
    sure = "medium" if stepping and recent and not trouble else "low"
    said = [*step, wrote, *announced, *([] if recent else [cpu]), basis, *trouble]
    return _verdict(facts, "running", sure, said)


def _patience(facts: RunFacts, usual: float | None, rules: Rules) -> tuple[float, float, Confidence]:
    """(silence that is slow, silence that is a wedge, how sure that is), in seconds of the log.

    Who computes gets more of it; a known fatal line takes it away; a known step time measures it.
    """
    busy, fatal = signs.busy(facts, rules), any(hit.fatal for hit in known_hits(facts))
    troubled = facts.log is not None and facts.log.exceptions > 0
    slow_s = rules.quiet_wedged_s if busy else rules.quiet_slow_s
    if usual is not None:
        slow_s = max(rules.slow_factor * usual, rules.slow_min_s)
    if fatal:
        return (
            slow_s,
            rules.alone_min_s if busy else max(rules.fatal_quiet_s, rules.strong_factor * (usual or 0)),
            "medium",
        )
    if usual is not None and busy:
        return slow_s, max(rules.alone_factor * usual, rules.busy_quiet_s), "low"
    if usual is not None:
        # Waiting for data looks just so, and nobody tells of the queue.
        return slow_s, max(rules.alone_factor * usual, rules.alone_min_s), "low"
    if troubled:
        return slow_s, rules.quiet_slow_s if busy else rules.alone_min_s, "low"
    return slow_s, float("inf") if busy else rules.quiet_wedged_s, "low"


def _ending(facts: RunFacts) -> Verdict:
    if facts.family.count == 0:
        what = "its processes have ended; the supervisor is about to record how"
    else:
        left = plural(facts.family.count, "process is", "processes are")
        what = f"the program has ended; {left} left, which the supervisor ends"
    return _verdict(facts, "running", "low", [what, *log_sentences(facts)])


def _verdict(
    facts: RunFacts, state: State, sure: Confidence, said: list[str], for_s: float | None = None
) -> Verdict:
    """Adds what every live run tells: a kill under way, the GPUs' load beside a bad verdict, what to do."""
    told = list(dict.fromkeys(said))
    if facts.kill_requested_age_s is not None:
        told.insert(0, f"its end was asked for {age(facts.kill_requested_age_s)} ago")
    if state in ("wedged", "slow") and facts.gpus:
        told.append(signs.gpus_sentence(facts))
    if facts.heartbeat is not None and facts.heartbeat.not_finite:
        told.append(f"not a finite number: {', '.join(facts.heartbeat.not_finite)}")
    told += [f"damaged: {problem}" for problem in facts.problems]
    return Verdict(state, sure, tuple(told), _next(facts, state), for_s or facts.started_age_s)


def _next(facts: RunFacts, state: State) -> tuple[str, ...]:
    explain = (f"dflashctl explain {facts.name}",) if known_hits(facts) else ()
    if state == "wedged":
        name = facts.name
        look = (f"dflashctl stacks {name}", f"dflashctl logs {name} -n 50")
        return (*explain, *look, f"dflashctl kill {name}")
    if state == "slow":
        return (*explain, f"dflashctl logs {facts.name} -n 50")
    return explain
