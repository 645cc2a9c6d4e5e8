"""One look at a host: facts from inside and from the GPUs' side in one round, judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflashctl.config.hosts import Host
from dflashctl.errors import ContainerDown, DflashError
from dflashctl.gpus import facts as gpufacts
from dflashctl.gpus import smi
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.runs import known, lastseen
from dflashctl.runs.facts import Contact, GpuUse, RunFacts, listed, mapping, number, text
from dflashctl.runs.readfacts import read_answer
from dflashctl.runs.verdict import Verdict, told

SAMPLE_S = 0.4
SCAN_S = 1.0
"""About 200 MB of an ordinary log; the ends of longer ones are searched in any case."""
OBSERVE_TIMEOUT_S = 15.0
"""A look takes about a second. After this the engine looks whether the container is frozen, and says so."""
GPU_PATIENCE_S = 6.0
"""A driver that hangs must not hide the runs: so much longer than the look inside it may take."""


@dataclass(frozen=True)
class Row:
    """A run and what is said of it."""

    facts: RunFacts
    verdict: Verdict

    @property
    def tokens_per_s(self) -> float | None:
        """As the run reports it; 0 where it stands still."""
        if self.verdict.state not in ("running", "slow", "wedged"):
            return None
        if self.verdict.state == "wedged":
            return 0.0
        beat, steps = self.facts.heartbeat, self.facts.steps
        reported = beat.metrics.get("tokens_per_s") if beat else None
        return reported if reported is not None else steps.tokens_per_s if steps else None


@dataclass(frozen=True)
class Look:
    """A host at one moment. `contact` is "ok", or why its runs are shown as last seen."""

    host: str
    rows: tuple[Row, ...] = ()
    contact: Contact = "ok"
    gpu_count: int | None = None
    gpu_problem: str = ""
    hidden: int = 0

    @property
    def live(self) -> int:
        return sum(not row.verdict.ended for row in self.rows)

    @property
    def bad(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict.bad)


@dataclass
class Memory:
    """What a command keeps from look to look: how far each log was read, since when a step is the last."""

    resume: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Run id -> (step, monotonic time of the container at which it was first seen)."""
    last: Look | None = None
    last_at: float = 0.0

    def learn(self, answer: Mapping[str, Any], runs: Sequence[RunFacts]) -> list[RunFacts]:
        """Facts with what only a watcher knows: for how long the present step has been seen."""
        mono = number(mapping(answer.get("now")).get("mono")) or 0.0
        for raw in map(mapping, listed(answer.get("runs"))):
            resume = mapping(raw.get("log")).get("resume")
            if resume:
                self.resume[text(raw.get("id"))] = resume
        return [self._with_step_age(facts, mono) for facts in runs]

    def _with_step_age(self, facts: RunFacts, mono: float) -> RunFacts:
        """The first look alone says nothing: the step may be old already."""
        if facts.step is None:
            return facts
        known_step, first = self.steps.get(facts.id, (None, mono))
        if known_step == facts.step:
            return replace(facts, step_seen_age_s=max(mono - first, 0.0))
        self.steps[facts.id] = (facts.step, mono)
        return facts if known_step is None else replace(facts, step_seen_age_s=0.0)


def look(
    engine: Engine,
    *,
    tag: str | None = None,
    run_id: str | None = None,
    memory: Memory | None = None,
    sample_s: float = SAMPLE_S,
    scan_s: float = SCAN_S,
) -> Look:
    """Ask both sides at once and judge. `scan_s`: time to search the middle of long logs.

    Raises what the look inside raises; the GPUs' side may fail.
    """
    memory = memory or Memory()
    answers: list[dict[str, Any]] = []
    bugs: list[Exception] = []

    def outside() -> None:
        try:
            answers.append(gpufacts.ask_host(engine, 1))
        except Exception as error:
            bugs.append(error)

    # A daemon: neither Ctrl-C nor the answer waits for a driver that hangs.
    thread = threading.Thread(target=outside, name="host-facts", daemon=True)
    thread.start()
    request = {
        "state_dir": engine.host.state_dir,
        "tag": tag,
        "id": run_id,
        "sample_s": sample_s,
        "known": known.patterns(),
        "resume": memory.resume,
        "scan_s": scan_s,
    }
    answer = call(engine, "observe", request, timeout_s=OBSERVE_TIMEOUT_S + scan_s)
    thread.join(GPU_PATIENCE_S)
    if bugs:
        raise bugs[0]
    gpus = smi.read(answers[0]) if answers else smi.SmiReading(problem="nvidia-smi does not answer in time")
    seen = judged(engine.host, answer, gpus, memory)
    remember(engine.host, seen, tag is None and run_id is None)
    return seen


def judged(host: Host, answer: Mapping[str, Any], gpus: smi.SmiReading, memory: Memory) -> Look:
    """Both answers as a Look. Pure but for the memory."""
    facts = [with_gpus(each, gpus) for each in memory.learn(answer, read_answer(answer))]
    rows = tuple(Row(each, told(each)) for each in facts)
    count = len(gpus.gpus) if not gpus.problem else host.gpus.expect
    problem = gpus.problem or ""
    if not problem and host.gpus.expect is not None and len(gpus.gpus) != host.gpus.expect:
        problem = f"{host.gpus.expect} GPUs are expected"
    hidden = answer.get("hidden")
    result = Look(host.name, rows, "ok", count, problem, hidden if isinstance(hidden, int) else 0)
    memory.last, memory.last_at = result, time.monotonic()
    return result


def with_gpus(facts: RunFacts, gpus: smi.SmiReading) -> RunFacts:
    """The load of the GPUs that the run was given, found by UUID; indices may have changed since."""
    given = {text(mapping(each).get("uuid")) for each in listed(facts.record.get("gpus"))} - {""}
    held = [gpu for gpu in gpus.gpus if gpu.uuid in given]
    uses = tuple(GpuUse(gpu.index, gpu.utilization_pct, gpu.memory_used_mib) for gpu in held)
    return replace(facts, gpus=uses)


def remember(host: Host, seen: Look, whole_list: bool) -> None:
    """Keep the live runs for a moment without contact."""
    at = time.time()
    runs = [
        lastseen.Seen(
            row.facts.id, row.facts.tag, row.verdict.state, row.facts.step, row.facts.gpu_indices, at
        )
        for row in seen.rows
        if not row.verdict.ended
    ]
    if not whole_list:
        looked_at = {row.facts.id for row in seen.rows}
        runs += [each for each in lastseen.load(host) if each.id not in looked_at]
    lastseen.store(host, runs)


def without_contact(host: Host, error: DflashError, memory: Memory, tag: str | None = None) -> Look:
    """What can be said when the host does not answer: its runs as last seen, none of them failed."""
    contact: Contact = "lost"
    if isinstance(error, ContainerDown):
        contact = "frozen" if "frozen" in error.what else "stopped"
    if memory.last is not None:
        age_s = time.monotonic() - memory.last_at
        live = [row for row in memory.last.rows if not row.verdict.ended]
        kept = [row for row in memory.last.rows if row.verdict.ended]
        facts = [
            replace(
                row.facts,
                contact=contact,
                contact_detail=error.what,
                last_seen=row.facts.last_seen if row.facts.contact != "ok" else _words(row),
                last_seen_age_s=age_s,
            )
            for row in live
        ]
        return replace(
            memory.last,
            rows=(*(Row(each, told(each)) for each in facts), *kept),
            contact=contact,
            gpu_problem="",
        )
    now = time.time()
    rows = []
    for each in lastseen.load(host):
        if tag is None or each.tag == tag:
            facts_ = RunFacts(
                id=each.id,
                tag=each.tag,
                contact=contact,
                contact_detail=error.what,
                last_seen=each.words,
                last_seen_age_s=now - each.at,
                gpu_indices=each.gpus,
            )
            rows.append(Row(facts_, told(facts_)))
    return Look(host.name, tuple(rows), contact)


def _words(row: Row) -> str:
    step = row.facts.step
    return row.verdict.state if step is None else f"{row.verdict.state} at step {step:,}"
