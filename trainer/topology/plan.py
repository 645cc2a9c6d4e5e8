"""Which layout of a host's GPUs is the fastest: predicted from rates measured on one of them. Pure.

Seconds for a batch of B context tokens:

    colocated over N   B/(N t) + B/(N d) + o(N)         every GPU does both in turn: always in balance
    split T:D          max(B/(T t), B/(D d) + o(D))     the slower side sets the pace
    threads T:D        as split, at best                one interpreter for all of them

t: tokens a second of the frozen target on one GPU; d: of the drafter's forward and backward, at the recipe's
anchors; o(n): one optimizer step and, for n > 1, the gradients' ring all-reduce: 2 (n-1)/n of their bytes go
over the link.

Where colocated does not fit, each rank keeps its share of the optimizer's moments alone. Gradients are then
scattered and new weights gathered, which travels as far as the ring does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

GIB = 2.0**30
RESERVE = 0.06
"""Share of a GPU's memory that is left free: the context, the allocator's pieces."""

Kind = Literal["colocated", "split", "threads"]


@dataclass(frozen=True)
class Rates:
    """What one GPU does, and needs, for this recipe."""

    target_tokens_s: float
    drafter_tokens_s: float  # forward and backward
    optimizer_s: float  # one step of it
    gradient_bytes: float
    batch_tokens: float
    link_bytes_s: float  # from one GPU to another
    bytes_per_token: float  # of hidden states
    memory_bytes: float  # of one GPU
    target_bytes: float  # weights, and what reading a colocated rank's share of a batch needs beside them
    drafter_bytes: float  # weights, moments, gradients, activations, and that share's states; no target
    held_bytes: float  # split: of the target on the first drafter: its ends or, to measure, all of it
    slots: int  # split: batches of hidden states that the drafters' memory has room for
    gpus: int
    moment_bytes: float = 0.0  # of the drafter's, what ranks may share out
    target_pass_bytes: float = 0.0  # of the target's, what grows with the rows that it reads at once
    drafter_pass_bytes: float = 0.0  # of the drafter's, what grows with the rows of its share

    def update_s(self, drafters: int) -> float:
        """What follows a batch's gradients on each of so many drafters."""
        travelled = 2 * (drafters - 1) / drafters * self.gradient_bytes
        return self.optimizer_s + travelled / self.link_bytes_s


@dataclass(frozen=True)
class Layout:
    """Who computes what: `targets` and `drafters` are both all ranks where they share."""

    kind: Kind
    targets: int
    drafters: int

    @property
    def gpus(self) -> int:
        return self.targets if self.kind == "colocated" else self.targets + self.drafters

    def __str__(self) -> str:
        if self.kind == "colocated":
            return f"colocated on {self.gpus}"
        return f"{self.kind} {self.targets}:{self.drafters}"


@dataclass(frozen=True)
class Prediction:
    """What a layout should do. `needs` is the fullest GPU's memory; `shares`: the optimizer, too."""

    layout: Layout
    tokens_s: float
    bottleneck: str
    needs_bytes: float
    memory_bytes: float
    shares: bool = False
    against: str = ""
    """Why the recipe does not go with this layout; empty where it does."""

    @property
    def fits(self) -> bool:
        """Into a GPU's memory."""
        return self.needs_bytes <= self.memory_bytes * (1 - RESERVE)

    @property
    def runs(self) -> bool:
        return self.fits and not self.against


def layouts(gpus: int) -> list[Layout]:
    """Every layout that uses all GPUs."""
    found = [Layout("colocated", gpus, gpus)]
    for kind in ("split", "threads"):
        found += [Layout(kind, targets, gpus - targets) for targets in range(1, gpus)]
    return found


def predict(layout: Layout, rates: Rates) -> Prediction:
    """Tokens a second of a layout, and what holds it there."""
    batch = rates.batch_tokens
    target_s = batch / (layout.targets * rates.target_tokens_s)
    drafter_s = batch / (layout.drafters * rates.drafter_tokens_s) + rates.update_s(layout.drafters)
    if layout.kind == "colocated":
        slower = "the target" if target_s > drafter_s else "the drafter"
        needs = rates.target_bytes + rates.drafter_bytes
        found = Prediction(layout, batch / (target_s + drafter_s), slower, needs, rates.memory_bytes)
        elsewhere = rates.moment_bytes * (1 - 1 / layout.drafters)
        if found.fits or not elsewhere:
            return found
        return replace(found, needs_bytes=needs - elsewhere, shares=True)
    links = min(layout.targets, layout.drafters)
    sides = {
        f"{layout.targets} target{_s(layout.targets)}": target_s,
        f"{layout.drafters} drafter{_s(layout.drafters)}": drafter_s,
        "the link": batch * rates.bytes_per_token / (links * rates.link_bytes_s),
    }
    bottleneck = max(sides, key=lambda name: sides[name])
    more = rates.gpus / layout.drafters - 1  # fewer drafters than colocated ranks: larger shares of a batch
    target_bytes = rates.target_bytes + more * rates.target_pass_bytes
    drafter_bytes = rates.drafter_bytes + more * rates.drafter_pass_bytes
    if layout.kind == "threads":  # the main thread tries a whole step beside the first target
        needs = target_bytes + drafter_bytes
    else:
        slots = rates.slots * batch / layout.drafters * rates.bytes_per_token
        needs = max(target_bytes, drafter_bytes + rates.held_bytes + slots)
    return Prediction(layout, batch / sides[bottleneck], bottleneck, needs, rates.memory_bytes)


def ranked(rates: Rates, against: Callable[[Layout], str] = lambda _: "") -> list[Prediction]:
    """Every layout's prediction: those that run first, the fastest first; threads after equals.

    `against` tells why the recipe does not go with a layout; nothing where it does.
    """
    order = {"colocated": 0, "split": 1, "threads": 2}
    found = [replace(predict(layout, rates), against=against(layout)) for layout in layouts(rates.gpus)]
    return sorted(found, key=lambda each: (not each.runs, -each.tokens_s, order[each.layout.kind]))


def choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """The first that runs."""
    return next((each for each in predictions if each.runs), None)


def _s(count: int) -> str:
    return "" if count == 1 else "s"
