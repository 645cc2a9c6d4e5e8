"""Verdicts as a table: a row a situation, with its facts, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflashctl.runs.facts import Family, Heartbeat, Hit, Log, Process, RunFacts, Steps
from dflashctl.runs.verdict import judge


@dataclass
class Case:
    name: str
    facts: RunFacts
    state: str
    sure: str | None
    says: list[str]
    never: list[str]
    next: list[str] | None

    def check(self) -> None:
        verdict = judge(self.facts)
        told = "\n".join(verdict.evidence)
        assert (verdict.state, self.sure or verdict.confidence) == (self.state, verdict.confidence), told
        for piece in self.says:
            assert piece in told
        for piece in self.never:
            assert piece not in told
        assert verdict.evidence, "no state without its evidence"
        if self.next is not None:
            assert list(verdict.next) == self.next


class Table(list[Case]):
    """Rows, each added by a call."""

    def __call__(
        self,
        name: str,
        *,
        state: str,
        sure: str | None = None,
        says: list[str] | None = None,
        never: list[str] | None = None,
        next: list[str] | None = None,
        **facts: Any,
    ) -> None:
        """
        Args:
            sure: the confidence.
            says: pieces of the evidence, in any order; never: pieces that must not be there.
        """
        base: dict[str, Any] = {
            "id": "20261130T120000000-abcdef",
            "tag": "localtls",
            "created_age_s": 602.0,
            "started_age_s": 600.0,
            "sample_s": 0.5,
            "family": busy(),
        }
        self.append(Case(name, RunFacts(**(base | facts)), state, sure, says or [], never or [], next))


def busy(cpu_s: float = 0.6, count: int = 3) -> Family:
    return Family(
        count, cpu_s, 20 * 2**30, {"S": count - 1, "R": 1}, (Process(40, "python", "R", "", cpu_s),)
    )


def idle(state: str = "S", wchan: str = "futex_wait_queue", rss: int = 124 * 2**30) -> Family:
    return Family(1, 0.0, rss, {state: 1}, (Process(40, "python", state, wchan, 0.0, rss, 34),))


def beat(phase: str = "training", age_s: float = 1.0, **more: Any) -> Heartbeat:
    return Heartbeat(phase, age_s, **({"phase_age_s": 500.0, "deadline_s": 60.0, "step": 118} | more))


def steps(age_s: float = 2.0, **more: Any) -> Steps:
    return Steps(118, age_s, **({"median_step_s": 3.6, "gap_s": 3.6} | more))


def log(quiet_s: float = 2.0, **more: Any) -> Log:
    return Log(path="/workspace/train.log", size=9000, quiet_s=quiet_s, **more)


TLS_TEXT = "AssertionError … assert torch._C._is_key_in_tls(attr_name)"
TLS = {
    "exceptions": 6,
    "first_exception": Hit(TLS_TEXT, 214),
    "known": (Hit("assert torch._C._is_key_in_tls(attr_name)", 212, "cudagraph-trees-tls", 6, True),),
}
DEAD = ("drafter-0", "drafter-1", "drafter-2")
