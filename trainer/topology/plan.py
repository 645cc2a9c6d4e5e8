"""Which layout of a host's GPUs is the fastest: predicted from rates measured on one of them. Pure.

    colocated over N   N / (1/t + 1/d)         every GPU does both in turn: always in balance
    split T:D          min(T t, D d, link)     the slower side sets the pace
    threads T:D        as split, at best       one interpreter for all of them

t: context tokens a second of the frozen target on one GPU; d: of the drafter, at the recipe's anchors, the
whole step included; link: tokens a second that hidden states can travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GIB = 2.0**30
RESERVE = 0.06
"""Share of a GPU's memory that is left free: the context, the allocator's pieces."""

Kind = Literal["colocated", "split", "threads"]


@dataclass(frozen=True)
class Rates:
    """What one GPU does, and needs, for this recipe."""

    target_tokens_s: float
    drafter_tokens_s: float  # forward, backward and optimizer
    link_bytes_s: float  # from one GPU to another
    bytes_per_token: float  # of hidden states
    memory_bytes: float  # of one GPU
    target_bytes: float  # weights, and what a batch's pass needs beside them
    drafter_bytes: float  # weights, moments, gradients, activations, and a batch's states
    gpus: int


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
    """What a layout should do. `needs` is the fullest GPU's memory."""

    layout: Layout
    tokens_s: float
    bottleneck: str
    needs_bytes: float
    memory_bytes: float

    @property
    def fits(self) -> bool:
        return self.needs_bytes <= self.memory_bytes * (1 - RESERVE)


def layouts(gpus: int, threads_sound: bool = True) -> list[Layout]:
    """Every layout that uses all GPUs."""
    found = [Layout("colocated", gpus, gpus)]
    found += [Layout("split", targets, gpus - targets) for targets in range(1, gpus)]
    if threads_sound:
        found += [Layout("threads", targets, gpus - targets) for targets in range(1, gpus)]
    return found


def predict(layout: Layout, rates: Rates) -> Prediction:
    """Tokens a second of a layout, and what holds it there."""
    t, d = rates.target_tokens_s, rates.drafter_tokens_s
    if layout.kind == "colocated":
        speed = layout.gpus / (1 / t + 1 / d)
        slower = "target" if t < d else "drafter"
        needs = rates.target_bytes + rates.drafter_bytes
        return Prediction(layout, speed, f"every GPU, {slower} first", needs, rates.memory_bytes)
    sides = {
        f"{layout.targets} target{_s(layout.targets)}": layout.targets * t,
        f"{layout.drafters} drafter{_s(layout.drafters)}": layout.drafters * d,
        "link": min(layout.targets, layout.drafters) * rates.link_bytes_s / rates.bytes_per_token,
    }
    bottleneck = min(sides, key=lambda name: sides[name])
    needs = max(rates.target_bytes, rates.drafter_bytes)
    return Prediction(layout, sides[bottleneck], bottleneck, needs, rates.memory_bytes)


def ranked(rates: Rates, threads_sound: bool = True) -> list[Prediction]:
    """Every layout's prediction: those that fit first, the fastest first; threads after equals."""
    order = {"colocated": 0, "split": 1, "threads": 2}
    found = [predict(layout, rates) for layout in layouts(rates.gpus, threads_sound)]
    return sorted(found, key=lambda each: (not each.fits, -each.tokens_s, order[each.layout.kind]))


def choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """The first that fits."""
    return next((each for each in predictions if each.fits), None)


def _s(count: int) -> str:
    return "" if count == 1 else "s"
