"""The files of a run that the trainer writes: heartbeat, metrics, summary, root cause. Formats:
docs/run-folder.md.

The heartbeat is written by the main thread alone, from `beat()` calls inside its loops. A helper thread would
go on beating while the main thread hangs, and a wedged run would look alive.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import statistics
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

from trainer import failures
from trainer.errors import Stopped
from trainer.failures import KnownFailure

VERSION = 1
PHASES = ("loading", "data", "compiling", "training", "evaluating", "saving", "done")
# How old a heartbeat may be in each phase before the run counts as stale. Loading and compiling are single
# calls.
DEADLINE_S = {
    "loading": 900.0,
    "data": 120.0,
    "compiling": 900.0,
    "training": 60.0,
    "evaluating": 120.0,
    "saving": 300.0,
    "done": 60.0,
}
BEAT_EVERY_S = 1.0


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace the file: all of it or nothing."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        json.dump({**value, "version": VERSION}, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class RunFiles:
    """One run's folder, and the run's place in time: phase, step, and whether somebody asked it to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.phase = "loading"
        self.step: int | None = None
        self.total_steps: int | None = None
        self.metrics: dict[str, float] = {}
        self.started = time.monotonic()
        self._phase_since = self.started
        self._last_beat = float("-inf")
        self._step_times: deque[float] = deque(maxlen=101)
        self._last_step_at: float | None = None
        self._stop: tuple[str, int] | None = None
        self._failed = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def enter(self, phase: str) -> None:
        """Begin a phase; it is in the heartbeat and in events.jsonl at once."""
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
        self.phase = phase
        self._phase_since = time.monotonic()
        self._last_step_at = None  # time between phases is no step time
        self._append(
            "events.jsonl", {"at": time.time(), "mono": self._phase_since, "event": "phase", "phase": phase}
        )
        self.beat(force=True)

    def stepped(self, step: int) -> None:
        """A training step is done."""
        now = time.monotonic()
        if self._last_step_at is not None:
            self._step_times.append(now - self._last_step_at)
        self._last_step_at = now
        self.step = step
        self.beat()

    def beat(self, force: bool = False) -> None:
        """Say that the main thread is alive; cheap enough for inner loops.

        Raises:
            Stopped: a signal asked the run to end.
        """
        now = time.monotonic()
        if force or now - self._last_beat >= BEAT_EVERY_S:
            self._last_beat = now
            self._write_heartbeat(now)
        if self._stop is not None:
            name, code = self._stop
            self._stop = None
            raise Stopped(name, code)

    def _write_heartbeat(self, now: float) -> None:
        median = round(statistics.median(self._step_times), 6) if self._step_times else None
        write_json(
            self.folder / "heartbeat.json",
            {
                "pid": os.getpid(),
                "phase": self.phase,
                "step": self.step,
                "total_steps": self.total_steps,
                "wall": time.time(),
                "mono": now,
                "phase_since": self._phase_since,
                "deadline_s": DEADLINE_S[self.phase],
                "median_step_s": median,
                "queues": {},
                "threads": {thread.name: thread.is_alive() for thread in threading.enumerate()},
                "metrics": self.metrics,
            },
        )

    def record(self, metrics: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl; its plain numbers are also the heartbeat's."""
        known = {"step": self.step, "wall": time.time(), "phase": self.phase}
        self._append("metrics.jsonl", {**known, **metrics})
        self.metrics.update(
            {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float))}
        )

    def note(self, text: str) -> None:
        """Something worth keeping that is no failure."""
        self._append(
            "events.jsonl", {"at": time.time(), "mono": time.monotonic(), "event": "note", "text": text}
        )

    def _append(self, name: str, value: dict[str, Any]) -> None:
        # One write of one line: the supervisor appends to events.jsonl too.
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")

    def summarise(
        self,
        headline: str,
        columns: list[str],
        rows: list[list[str]],
        notes: list[str],
        lossless: bool | None,
        best_acceptance_length: float | None,
    ) -> None:
        """What was learnt, once, at the end."""
        write_json(
            self.folder / "summary.json",
            {
                "headline": headline,
                "lossless": lossless,
                "best_acceptance_length": best_acceptance_length,
                "table": {"columns": columns, "rows": rows},
                "notes": notes,
            },
        )

    def fail(self, error: BaseException) -> tuple[KnownFailure, ...]:
        """Write the root cause, and which known failures it is; those are returned, for the log.

        The first failure is kept: what follows it is usually a consequence.
        """
        known = failures.of_error(error)
        with self._failed:
            path = self.folder / "root_cause.json"
            if path.exists():
                return known
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            cause = {
                "error": f"{type(error).__name__}: {error}",
                "where": where,
                "traceback": "".join(traceback.format_exception(error)),
                "phase": self.phase,
                "step": self.step,
                "known": failures.as_json(known),
                "wall": time.time(),
            }
            try:
                write_json(path, cause)
            except OSError as problem:  # a full disk is the likeliest of causes, and the log may be elsewhere
                os.write(2, f"{path.name} cannot be written: {problem}\n".encode())
        return known

    def listen(self) -> None:
        """From now on SIGTERM and SIGINT end the run at its next `beat`, and an exception in any thread at
        once.

        A second signal of a kind ends the process immediately. SIGUSR1 ends nothing: faulthandler writes all
        threads' stacks into `stacks-<pid>.txt` in the run's folder, also while Python itself hangs. Main
        thread only.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            self._stop = (signal.Signals(number).name, 128 + number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        threading.excepthook = self._thread_failed
        self._stacks = (self.folder / f"stacks-{os.getpid()}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def _thread_failed(self, details: threading.ExceptHookArgs) -> None:
        """A dead thread would leave the others waiting for it for ever."""
        error = details.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        known = self.fail(error)
        name = details.thread.name if details.thread else "?"
        text = "".join(traceback.format_exception(error))
        os.write(2, f"thread {name} failed; the run ends\n{text}{failures.words(known)}\n".encode())
        # Not sys.exit: that would end this thread only, and wait for others at the interpreter's exit.
        os._exit(70)
