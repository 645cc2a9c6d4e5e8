"""Numbered batches from several producers to one consumer, in order, a bounded number of them at a time."""

from __future__ import annotations

from typing import Generic, TypeVar

from trainer.topology.crew import Crew

T = TypeVar("T")


class Handover(Generic[T]):
    """A window over batch numbers: a batch may be put once fewer than `depth` batches before it are untaken.

    A window instead of a queue: producers that finish out of order can neither fill it with later batches
    while the next one waits outside, nor hold more than `depth` batches of hidden states in memory.
    """

    def __init__(self, crew: Crew, depth: int, wait_s: float, first: int = 0) -> None:
        self._crew, self._depth, self._wait_s = crew, depth, wait_s
        self._claimed = self._next = first
        self._there: dict[int, T] = {}

    def claim(self) -> int:
        """The number that the calling producer makes next."""
        with self._crew.changing():
            number, self._claimed = self._claimed, self._claimed + 1
        return number

    def put(self, number: int, item: T) -> None:
        """Raises WaitedTooLong: the consumer takes nothing."""
        self._crew.wait(
            lambda: number < self._next + self._depth,
            self._wait_s,
            f"room for batch {number} of hidden states",
        )
        with self._crew.changing():
            self._there[number] = item

    def take(self) -> T:
        """The next batch in order. Raises WaitedTooLong: no producer brings it."""
        number = self._next
        self._crew.wait(lambda: number in self._there, self._wait_s, f"batch {number} of hidden states")
        with self._crew.changing():
            self._next += 1
            return self._there.pop(number)

    def waiting(self) -> int:
        """Batches that are there and untaken: the heartbeat's queue depth."""
        return len(self._there)
