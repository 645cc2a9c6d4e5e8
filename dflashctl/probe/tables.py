"""How a probe's answers are shown, and its JSON document. Pure but for rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflashctl.probe.verdict import Verdict
from dflashctl.render.text import duration

COLUMNS = ("CASE", "ANSWER", "EXPECTED", "", "TOOK", "WHAT IT ASKS")
STYLES = {"passes": "green", "fails": "red", "hangs": "bold red", "crashes": "bold red", "needs": "yellow"}


def row(verdict: Verdict) -> tuple[str, ...]:
    """One line of the table. The fourth column marks what is not as expected."""
    wanted = verdict.expected
    return (
        verdict.case.name,
        verdict.words,
        f"{wanted.words} ({wanted.basis})" if wanted else "-",
        {True: "as expected", False: "DIFFERS", None: ""}[verdict.agrees],
        duration(verdict.seconds) if verdict.seconds is not None else "-",
        verdict.case.question,
    )


def details(verdict: Verdict) -> list[str]:
    """What stands below the table: figures, and the error's own words."""
    found = []
    if verdict.figures:
        found.append(", ".join(f"{name} {value}" for name, value in verdict.figures.items()))
    if verdict.said and verdict.answer != "needs":
        found.append(verdict.said)
    if verdict.agrees is False and verdict.expected is not None:
        kinds = f" with {' or '.join(verdict.expected.failures)}" if verdict.expected.failures else ""
        found.append(f"expected {verdict.expected.answer}{kinds}: {verdict.expected.source}")
    return [f"{verdict.case.name}: {words}" for words in found]


def document(verdict: Verdict) -> dict[str, Any]:
    """Of one case, in dflashctl.probe/1."""
    wanted = verdict.expected
    return {
        "name": verdict.case.name,
        "question": verdict.case.question,
        "answer": verdict.answer,
        "failure": verdict.failure,
        "said": verdict.said,
        "seconds": verdict.seconds,
        "figures": dict(verdict.figures),
        "expected": None
        if wanted is None
        else {
            "answer": wanted.answer,
            "failures": list(wanted.failures),
            "torch": wanted.torch,
            "basis": wanted.basis,
            "source": wanted.source,
        },
        "agrees": verdict.agrees,
    }


def documents(verdicts: Sequence[Verdict], seen: Mapping[str, Any]) -> dict[str, Any]:
    return {"torch": seen.get("torch"), "cases": [document(verdict) for verdict in verdicts]}
