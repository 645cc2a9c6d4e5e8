"""From what a program's process came to, to an answer in words, and whether that was expected. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dflashctl.errors import DflashError, GpusBusy, RunBad, UsageError
from dflashctl.probe.cases import Case
from dflashctl.probe.expect import Expectation, expected
from dflashctl.runs import known
from dflashctl.runs.ending import signal_name

Answer = Literal["passes", "fails", "hangs", "crashes", "needs", "not run"]


@dataclass(frozen=True)
class Verdict:
    """About one case. `failure`: its row in the table of known failures, of several the one that was
    expected; `said`: the error, or what is needed, of which `lacks` tells the kind. `agrees`: with
    `expected`; None where nothing is expected or nothing was tried."""

    case: Case
    answer: Answer
    said: str = ""
    lacks: Literal["", "gpus", "compiler", "torch"] = ""
    failure: str | None = None
    expected: Expectation | None = None
    seconds: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def agrees(self) -> bool | None:
        if self.expected is None or self.answer in ("needs", "not run"):
            return None
        if self.answer == "passes":
            return self.expected.answer != "fails"
        if self.answer != "fails" or self.expected.answer == "passes":
            return False
        return not self.expected.failures or self.failure in self.expected.failures

    @property
    def bad(self) -> bool:
        """Not as expected; without an expectation: tried, and does not pass."""
        if self.answer == "needs":
            return False
        return self.agrees is False or (self.agrees is None and self.answer != "passes")

    @property
    def words(self) -> str:
        if self.answer == "fails":
            return f"fails: {self.failure or self.said}"
        return f"{self.answer} {self.said}" if self.answer == "needs" else self.answer


def judge(
    probe: str, case: Case, lines: Sequence[Mapping[str, Any]], torch: str | None, deadline_s: float
) -> Verdict:
    """`lines`: of probe.jsonl, all of them; `deadline_s`: of the case."""
    wanted = expected(probe, case.name, torch)
    mine = [line for line in lines if line.get("case") == case.name]
    last = mine[-1] if mine else {}
    if last.get("state") == "skipped":
        why, lacks = str(last.get("why")), last.get("lacks")
        if lacks == "gpus" or lacks == "compiler" or lacks == "torch":
            return Verdict(case, "needs", why, lacks, expected=wanted)
        return Verdict(case, "not run", why, expected=wanted)
    if last.get("state") != "ended":
        begun = "it was ended while it ran" if mine else "the probe ended before"
        return Verdict(case, "not run", begun, expected=wanted)
    answer, said, failures = _outcome(last, deadline_s)
    meant = [name for name in failures if wanted is not None and name in wanted.failures]
    failure = next(iter(meant + failures), None)
    figures = (last.get("answer") or {}).get("figures") or {}
    seconds = last.get("seconds")
    return Verdict(case, answer, said, failure=failure, expected=wanted, seconds=seconds, figures=figures)


def _outcome(ended: Mapping[str, Any], deadline_s: float) -> tuple[Answer, str, list[str]]:
    """(answer, what was said, the known failures that its words show)."""
    tail = str(ended.get("tail") or "")
    if ended.get("timed_out"):
        killed = "and even SIGKILL does not end it" if ended.get("unkillable") else "killed"
        return "hangs", f"not done within {deadline_s:g} s, {killed}", []
    told = ended.get("answer") or {}
    if told.get("ok") and ended.get("exit") == 0:
        return "passes", "", []
    text = "\n".join(str(each.get("text")) for each in told.get("errors") or ()) or tail
    names = [row.name for row in known.find(text)]
    if ended.get("signal"):
        return "crashes", f"{signal_name(int(ended['signal']))}: {last_line(tail)}", names
    count = f" ({told['said']})" if told.get("said") else ""
    return "fails", last_line(text) + count, names


def last_line(text: str) -> str:
    """Where Python says what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"


def torch_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the look before the cases has seen; {} when it has not come so far."""
    return next((dict(line["look"]) for line in lines if "look" in line), {})


def error_of(verdicts: Sequence[Verdict], *, host: str, tag: str) -> DflashError | None:
    """How the command ends: not as expected before what could not be tried; None when all is as it should
    be."""
    bad = [verdict for verdict in verdicts if verdict.bad]
    if bad:
        names = ", ".join(verdict.case.name for verdict in bad)
        more = any(verdict.agrees is False for verdict in bad)
        what = f"{names}: {'not as expected' if more else 'not passed'}"
        return RunBad(what, where=host, next=f"dflashctl logs {tag}")
    wanting = [verdict for verdict in verdicts if verdict.answer == "needs"]
    if wanting:
        first = wanting[0]
        names = ", ".join(verdict.case.name for verdict in wanting if verdict.said == first.said)
        kind = GpusBusy if first.lacks == "gpus" else UsageError
        return kind(f"{names}: {first.words}", where=host, next="dflashctl doctor")
    return None
