"""The laptop's end of a host desk (agent/releases/hostdesk.py): the deploy lock, and an archive's way inside.

One remote command, which stays open for the whole deploy. It runs in a thread of its own, while the caller's
thread calls operations inside.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from dflashctl.errors import DflashError, Unreachable, VerificationFailed
from dflashctl.person import person
from dflashctl.remote import pct_messages
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine, Progress

SIGN_OF_LIFE_S = 15.0
"""A third of what the desk puts up with, at the most (agent/releases/hostdesk.py)."""

OPEN_S = 60.0
CLOSE_S = 30.0

Phase = Callable[[str], None]


class Desk:
    """Context manager: the lock is held from its beginning to its end.

    Entering raises Locked (exit 8), Unreachable, and what the engine raises. Leaving by an exception takes
    back inside what was delivered.
    """

    def __init__(
        self,
        engine: Engine,
        what: str,
        *,
        wait_s: float = 0.0,
        budget_s: float = 3600.0,
        phase: Phase | None = None,
    ) -> None:
        self._engine = engine
        self._what = what
        self._wait_s = wait_s
        self._budget_s = budget_s
        self._phase = phase or (lambda name: None)
        self._orders: queue.Queue[Iterable[bytes] | None] = queue.Queue()
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="host-desk", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._await("held", self._wait_s + OPEN_S)
        except BaseException:
            self._close(OPEN_S)
            raise
        return self

    def deliver(
        self,
        pieces: Iterable[bytes],
        size: int,
        to: str,
        *,
        mode: int,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> str:
        """Send `size` bytes and have them put at `to` inside. Returns what pct said about it: a hint only.

        Raises VerificationFailed (no space on the host), Locked, ContainerDown, Unreachable, and what
        `pieces` raises.
        """
        deadline = time.monotonic() + timeout_s
        self._order({"do": "deliver", "size": size, "to": to, "mode": mode})
        self._await("ready", OPEN_S)
        trouble: list[BaseException] = []
        self._orders.put(self._counted(pieces, size, progress, trouble))
        answer = self._await("delivered", max(deadline - time.monotonic(), 1.0), trouble)
        if answer["exit"] != 0:
            raise self._push_failed(str(answer["said"]), int(answer["exit"]))
        return str(answer["said"])

    def check(self) -> None:
        """Raises what ended the desk, if it has ended: then the lock is no longer ours."""
        if not self._thread.is_alive():
            self._raise()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._order({"do": "done"})
        self._close(CLOSE_S)

    def _close(self, within_s: float) -> None:
        self._closing.set()
        self._orders.put(None)
        self._thread.join(within_s)

    def _order(self, order: dict[str, Any]) -> None:
        self._orders.put([json.dumps(order).encode() + b"\n"])

    def _counted(
        self,
        pieces: Iterable[bytes],
        size: int,
        progress: Progress | None,
        trouble: list[BaseException],
    ) -> Iterator[bytes]:
        """Runs in the thread that feeds stdin: what goes wrong there is handed over to the caller's."""
        done = 0
        try:
            for piece in pieces:
                if self._closing.is_set():
                    return
                yield piece
                done += len(piece)
                if progress is not None:
                    progress(done, size)
        except Exception as error:
            trouble.append(error)
            self._closing.set()
            self._events.put({"trouble": True})

    def _pieces(self) -> Iterator[bytes]:
        while not self._closing.is_set() or not self._orders.empty():
            try:
                item = self._orders.get(timeout=SIGN_OF_LIFE_S)
            except queue.Empty:
                yield b"\n"
                continue
            if item is None:
                return
            yield from item

    def _serve(self) -> None:
        host = self._engine.host
        request = {
            "container": host.container if self._engine.has_separate_host else None,
            "code_root": host.code_root,
            "staging_dir": host.staging_dir,
            "wait_s": self._wait_s,
            "who": person(),
            "what": self._what,
            "host": host.name,
        }
        try:
            call(
                self._engine,
                "host_desk",
                request,
                where="host",
                timeout_s=self._wait_s + self._budget_s,
                on_event=self._events.put,
                more=self._pieces(),
            )
        except BaseException as error:
            self._failure = error
        finally:
            self._events.put(None)

    def _await(
        self, key: str, timeout_s: float, trouble: list[BaseException] | None = None
    ) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            event: dict[str, Any] | None = {}
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=max(deadline - time.monotonic(), 0.01))
            if trouble:
                raise trouble[0]
            if event is None:
                self._events.put(None)  # for whoever asks next
                self._raise()
            elif key in event:
                return event
            elif "waiting" in event:
                self._phase(waiting_words(event["waiting"]))
            elif "phase" in event:
                self._phase(str(event["phase"]))
            elif not event and time.monotonic() >= deadline:
                raise Unreachable(
                    f"the host did not answer within {timeout_s:.0f} s; nothing was switched",
                    where=self._engine.host.name,
                    next="deploy again; `dflashctl lock show` tells whether the lock is still held",
                )

    def _raise(self) -> None:
        raise self._failure or Unreachable(
            "the host ended the deploy's command; nothing was switched",
            where=self._engine.host.name,
            next="deploy again",
        )

    def _push_failed(self, said: str, code: int) -> DflashError:
        host = self._engine.host
        sudo = bool(host.ssh and host.ssh.sudo)
        known = pct_messages.classify(said, container=host.container or 0, where=host.name, sudo=sudo)
        return known or VerificationFailed(
            f"pct push failed (exit {code}): {said or 'no word about why'}; nothing switched",
            where=host.name,
            next="deploy again; `pct status` on the host tells how the container is",
        )


def waiting_words(holder: dict[str, Any]) -> str:
    """Who is waited for."""
    return f"waiting for {holder.get('who') or 'somebody'} ({holder.get('what') or 'a deploy'})"
