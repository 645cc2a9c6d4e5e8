"""An operation to which one goes on talking: its events as they come, orders as lines on its stdin
(agent/records/talk.py). The call runs in a thread of its own, so that two of them, inside and on the host,
wait for each other's facts at the same time."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self

from dflashctl.errors import Unreachable
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine

SIGN_OF_LIFE_S = 15.0
"""A third of what the other side puts up with, at the most (agent/records/talk.py)."""

CLOSE_S = 3.0
"""After the last order the operation ends by itself; waiting longer would help nobody."""

GIVE_UP_S = 0.5
"""The same after an error or Ctrl-C, with somebody waiting: long enough for the last order to leave."""


class Conversation:
    """Context manager; leaving it ends stdin, and so the operation."""

    def __init__(
        self,
        engine: Engine,
        op: str,
        request: dict[str, Any],
        *,
        where: Literal["inside", "host"],
        timeout_s: float,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`on_event` is told the events that nobody waits for."""
        self._engine = engine
        self._op = op
        self._request = request
        self._where = where
        self._timeout_s = timeout_s
        self._on_event = on_event or (lambda event: None)
        self._orders: queue.Queue[bytes | None] = queue.Queue()
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._result: dict[str, Any] | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=op, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.put(None)
        self._thread.join(CLOSE_S if kind is None else GIVE_UP_S)

    def event(self, key: str, timeout_s: float) -> Any:
        """The value of the next event with this key. Raises what ended the operation before."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._next(deadline)
            if event is None:
                raise self._failure or Unreachable(f"{self._op} ended early", where=self._engine.host.name)
            if key in event:
                return event[key]
            self._on_event(event)

    def say(self, **order: Any) -> None:
        """One order. Never waits."""
        self._orders.put(json.dumps(order).encode() + b"\n")

    def result(self, timeout_s: float) -> dict[str, Any]:
        """The operation's answer. Raises what it raised."""
        deadline = time.monotonic() + timeout_s
        while (event := self._next(deadline)) is not None:
            self._on_event(event)
        if self._result is None:
            raise self._failure or Unreachable(f"{self._op} gave no answer", where=self._engine.host.name)
        return self._result

    def _next(self, deadline: float) -> dict[str, Any] | None:
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=max(deadline - time.monotonic(), 0.01))
            if event is None:
                self._events.put(None)  # for whoever asks next
            return event
        raise Unreachable(f"{self._op} did not answer in time", where=self._engine.host.name)

    def _lines(self) -> Iterator[bytes]:
        while True:
            try:
                line = self._orders.get(timeout=SIGN_OF_LIFE_S)
            except queue.Empty:
                yield b"\n"
                continue
            if line is None:
                return
            yield line

    def _serve(self) -> None:
        try:
            self._result = call(
                self._engine,
                self._op,
                self._request,
                where=self._where,
                timeout_s=self._timeout_s,
                on_event=self._events.put,
                more=self._lines(),
            )
        except BaseException as error:
            self._failure = error
        finally:
            self._events.put(None)
