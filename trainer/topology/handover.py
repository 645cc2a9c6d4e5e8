"""Numbered batches from several producers to one consumer, in order, a bounded number of them at a time."""

from __future__ import annotations

import math
import threading
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
        self._makers: dict[int, str] = {}

    def claim(self) -> int:
        """The number that the calling producer makes next."""
        with self._crew.changing():
            number, self._claimed = self._claimed, self._claimed + 1
            self._makers[number] = threading.current_thread().name
        return number

    def put(self, number: int, item: T) -> None:
        """Wait for room, however long: the consumer may be measuring, or wait for another producer. It has
        deadlines of its own.
        """
        self._crew.wait(
            lambda: number < self._next + self._depth,
            math.inf,
            f"room for batch {number} of hidden states",
        )
        with self._crew.changing():
            self._there[number] = item

    def take(self) -> T:
        """The next batch in order. Raises WaitedTooLong: its producer, which is named, does not bring it."""
        number = self._next

        def what() -> str:
            return f"batch {number} of hidden states, of {self._makers.get(number, 'no thread')}"

        self._crew.wait(lambda: number in self._there, self._wait_s, what)
        with self._crew.changing():
            self._next += 1
            self._makers.pop(number, None)
            return self._there.pop(number)

    def waiting(self) -> int:
        """Batches that are there and untaken: the heartbeat's queue depth."""
        return len(self._there)
