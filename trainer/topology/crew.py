"""Worker threads of one process that cannot leave a zombie behind: the first failure of any of them ends
every wait of all of them, and every wait has a deadline and a reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from trainer.errors import Stopped, TrainerError

POLL_S = 0.2
"""How often a wait looks up: the run's heartbeat, and a signal that asks the run to stop."""
JOIN_S = 5.0


class WaitedTooLong(TrainerError):
    """A peer that neither failed nor delivered."""


class _Ended(BaseException):
    """Raised inside a worker's wait once the crew ends; no failure."""


class Crew:
    """Start threads, wait with them, end them. What a wait looks at changes under the lock of `changing`."""

    def __init__(self, beat: Callable[[], None]) -> None:
        """beat: called by the main thread while it waits; may raise, which ends the wait."""
        self._beat = beat
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._ending = False
        self.threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread of that name. Its exception is the crew's failure."""

        def body() -> None:
            try:
                work()
            except _Ended:
                pass
            except BaseException as error:
                error.add_note(f"in thread {name}")
                with self.changing():
                    self._failure = self._failure or error

        thread = threading.Thread(target=body, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change what others may be waiting for."""
        with self._changed:
            yield
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], deadline_s: float, what: str | Callable[[], str]) -> None:
        """Until `ready()`, which is asked under the lock.

        Args:
            what: is waited for; of a function, what it says at the end.
        Raises:
            the first failure of any thread, as it was raised there;
            WaitedTooLong: `deadline_s` is over.
        """
        end = time.monotonic() + deadline_s
        main = threading.current_thread() is threading.main_thread()
        while True:
            with self._changed:
                if self._failure is not None and main:
                    raise self._failure
                if self._failure is not None or self._ending:
                    raise _Ended
                if ready():
                    return
                left = end - time.monotonic()
                if left <= 0:
                    alive = ", ".join(self.alive()) or "no thread"
                    awaited = what if isinstance(what, str) else what()
                    raise WaitedTooLong(
                        f"{awaited}: nothing for {deadline_s:.0f} s; alive: {alive}",
                        where=threading.current_thread().name,
                        next="dflashctl stacks TAG shows where they are; train.layout.wait_s is the deadline",
                    )
                self._changed.wait(min(left, POLL_S))
            if main:
                self._beat()

    def alive(self) -> list[str]:
        return [thread.name for thread in self.threads if thread.is_alive()]

    def end(self) -> None:
        """Let every thread leave its next wait, and wait for that a little; the others are daemons."""
        with self.changing():
            self._ending = True
        end = time.monotonic() + JOIN_S
        for thread in self.threads:
            while thread.is_alive() and time.monotonic() < end:
                thread.join(POLL_S)
                with suppress(Stopped):  # it is the end already
                    self._beat()
