"""A run's result as people read it: the headline, the table, the notes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from trainer.evaluation.evaluator import Figure, Measurement
from trainer.model.random_target import WORTHLESS
from trainer.sections import Evaluate


@dataclass(frozen=True)
class Report:
    headline: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]
    lossless: bool

    def show(self) -> None:
        """Printed so that it is readable in a log file, too."""
        from rich.console import Console
        from rich.table import Table

        table = Table(*self.columns)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*row)
        console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False)
        console.print(self.headline, markup=False, style="bold")


def _equal(figure: Figure) -> str:
    return f"{figure.equal} of {figure.prompts}"


def make_report(
    section: Evaluate,
    before: Measurement | None,
    after: Measurement,
    lookup: Measurement,
    repetition: float,
    random_target: bool = False,
) -> Report:
    """All figures of a run. `before` is None when only a finished drafter was measured; figures of a
    target of random weights are called worthless.
    """

    def line(name: str, pick: str, part: str) -> list[str]:
        cells = [
            f"{getattr(getattr(one, pick), part):.2f}" if one else "-" for one in (before, after, lookup)
        ]
        return [name, *cells]

    first = section.first_tokens
    sampled = f"T={section.temperature:g}, fixed noise"
    rows = [
        line("greedy", "greedy", "acceptance_length"),
        line(f"greedy, first {first} tokens", "greedy", "first"),
        line(sampled, "sampled", "acceptance_length"),
        line(f"{sampled}, first {first} tokens", "sampled", "first"),
        [
            "greedy texts equal to the target's",
            _equal(before.greedy) if before else "-",
            _equal(after.greedy),
            "-",
        ],
        [
            f"T={section.temperature:g} texts equal to the target's",
            _equal(before.sampled) if before else "-",
            _equal(after.sampled),
            "-",
        ],
    ]
    measured = [one for one in (before, after) if one]
    lossless = all(one.greedy.lossless and one.sampled.lossless for one in measured)
    now = f"{after.greedy.acceptance_length:.2f}"
    headline = (
        f"acceptance length {before.greedy.acceptance_length:.2f} -> {now}"
        if before
        else f"acceptance length {now}"
    )
    texts = sum(one.greedy.prompts + one.sampled.prompts for one in measured)
    tokens = sum(one.greedy.tokens + one.sampled.tokens for one in measured)
    histogram = ", ".join(f"{size}: {count}" for size, count in after.greedy.histogram.items())
    notes = [
        f"lossless: {'yes' if lossless else 'NO'} ({texts} texts, {tokens:,} tokens compared)",
        f"tokens per greedy verification pass, and how many passes: {histogram}",
        f"{repetition:.0%} of the 8-grams in the target's greedy text are repeats: they flatter drafters",
        *_lookup_note(after, lookup),
    ]
    if random_target:
        headline, notes = f"RANDOM TARGET, worth nothing: {headline}", [WORTHLESS, *notes]
    return Report(headline, ["acceptance length", "before", "after", "prompt lookup"], rows, notes, lossless)


def _lookup_note(after: Measurement, lookup: Measurement) -> list[str]:
    """Who wins, said plainly."""
    found = []
    for name, mine, theirs in (
        ("greedy", after.greedy, lookup.greedy),
        ("sampled", after.sampled, lookup.sampled),
    ):
        a, b = mine.acceptance_length, theirs.acceptance_length
        winner = "neither" if f"{a:.2f}" == f"{b:.2f}" else "the drafter" if a > b else "prompt lookup"
        found.append(f"{name}: {winner} is ahead ({a:.2f} against {b:.2f})")
    return found
