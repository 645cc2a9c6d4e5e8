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
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer import failures
from trainer.errors import Stopped, TrainerError
from trainer.failures import KnownFailure
from trainer.machine import process_start
from trainer.run.stopping import StopSignals
from trainer.run.trackers import threw
from trainer.writing import Reserve, append_line, stamp, to_log, write_json

PHASES = ("loading", "data", "compiling", "training", "evaluating", "saving", "done")
# How old a heartbeat may be in each phase before the run counts as stale. Loading and compiling are single
# calls, and data ends with one: writing it for other processes.
DEADLINE_S = {
    "loading": 900.0,
    "data": 300.0,
    "compiling": 900.0,
    "training": 60.0,
    "evaluating": 120.0,
    "saving": 300.0,
    "done": 60.0,
}
# In training a beat may be a whole step, and other programs may take most of the machine. Before a step has
# been timed, this many times the phase's deadline; then this many times the slowest step, if that is more.
UNTIMED = 4
SLOWER = 10
ROOT_CAUSE = "root_cause.json"
BEAT_EVERY_S = 1.0
TELL_EVERY_S = 60.0


class RunFiles:
    """One run's folder, and the run's place in time: phase, step, and whether somebody asked it to stop."""

    def __init__(self, folder: Path, own: Path | None = None) -> None:
        """own: where this process's heartbeat and root cause go, if it is one of several of the run."""
        self.folder, self.own = folder, own or folder
        self.own.mkdir(parents=True, exist_ok=True)
        self.phase = "loading"
        self.loading_s = DEADLINE_S["loading"]  # until it is known how much there is to load
        self.step: int | None = None
        self.total_steps: int | None = None
        self.metrics: dict[str, float] = {}
        self.queues: dict[str, int] = {}  # depths, by name
        self.waited: dict[str, float] = {}  # seconds so far, by what was waited for
        self.peaks: dict[str, float] = {}  # the most memory so far in GiB, by device
        self.started = time.monotonic()
        self._phase_since = self.started
        self._last_beat = float("-inf")
        self._step_times: deque[float] = deque(maxlen=101)
        self._last_step_at: float | None = None
        # Those of an earlier life. Their time tells nothing: the clock may have been set since.
        self._history = {each: stamp(each / ROOT_CAUSE) for each in (self.folder, self.own)}
        self._signals: StopSignals | None = None
        self._reserve: Reserve | None = None
        self._told_of_disk = float("-inf")
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
        self._count(step)
        self.beat()

    def _count(self, step: int) -> None:
        """The step, and the time that it took."""
        now = time.monotonic()
        if self._last_step_at is not None:
            self._step_times.append(now - self._last_step_at)
        self._last_step_at = now
        self.step = step

    def beat(self, force: bool = False) -> None:
        """Say that the main thread is alive; cheap enough for inner loops.

        Raises:
            Stopped: a signal asked the run to end.
        """
        now = time.monotonic()
        if force or now - self._last_beat >= BEAT_EVERY_S:
            self._last_beat = now
            self._write_heartbeat(now)
        asked = self._signals.take() if self._signals else None
        if asked is not None:
            raise Stopped(*asked)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The time inside is spent waiting for `what`; the heartbeat tells how much it was. Threads besides
        the main one have names of their own, in `waited` from before they began.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited[what] = self.waited.get(what, 0.0) + time.monotonic() - began

    @property
    def deadline_s(self) -> float:
        """How old the heartbeat may become now."""
        allowed = self.loading_s if self.phase == "loading" else DEADLINE_S[self.phase]
        if self.phase != "training":
            return allowed
        if not self._step_times:
            return UNTIMED * allowed
        return max(allowed, SLOWER * max(self._step_times))

    @property
    def median_step_s(self) -> float | None:
        """Of the last hundred steps; None before the second."""
        return statistics.median(self._step_times) if self._step_times else None

    def failed_peer(self) -> str | None:
        """The error of another process of this run, if one has failed since this one began."""
        return self._failure(self.folder)

    def _failure(self, folder: Path) -> str | None:
        """The error of a root cause that was written since this process began."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = folder / ROOT_CAUSE
            cause = json.loads(path.read_text(encoding="utf-8"))
            if stamp(path) != self._history[folder]:
                return str(cause["error"])
        return None

    def forget_failure(self) -> None:
        """This run goes on in a folder where it failed once: that root cause is history."""
        _set_aside(self.folder)

    def write_text(self, name: str, text: str) -> None:
        """A small file for people."""
        path = self.folder / name
        self._write(path, lambda: path.write_text(text, encoding="utf-8"))

    def _sign(self, now: float) -> dict[str, Any]:
        """Who this process is, and where: what others decide by."""
        return {
            "pid": os.getpid(),
            "start": process_start(os.getpid()),
            "phase": self.phase,
            "step": self.step,
            "mono": now,
            "deadline_s": self.deadline_s,
        }

    def _write_heartbeat(self, now: float) -> None:
        median = self.median_step_s
        path = self.own / "heartbeat.json"
        beat = {
            **self._sign(now),
            "total_steps": self.total_steps,
            "wall": time.time(),
            "phase_since": self._phase_since,
            "median_step_s": None if median is None else round(median, 6),
            "queues": self.queues,
            "waited_s": {what: round(seconds, 3) for what, seconds in self.waited.items()},
            "peak_gib": {device: round(size, 3) for device, size in self.peaks.items()},
            "threads": {thread.name: thread.is_alive() for thread in threading.enumerate()},
            "metrics": self.metrics,
        }
        # Not waited for: while a checkpoint goes to the same disk, a flush takes as long as that.
        self._write(path, lambda: write_json(path, beat, to_disk=False))

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
        path = self.folder / name
        self._write(path, lambda: append_line(path, value))

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        """A full disk must not end what goes on in memory: it is said, now and then, and the line is lost."""
        try:
            write()
        except OSError as problem:
            now = time.monotonic()
            if now - self._told_of_disk >= TELL_EVERY_S:
                self._told_of_disk = now
                print(
                    f"WARNING: {path} cannot be written: {problem.strerror}; the run goes on without",
                    file=sys.stderr,
                    flush=True,
                )

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

        The first failure is kept: what follows it is usually a consequence. That of an earlier life is none.
        """
        known = failures.of_error(error)
        with self._failed:
            path = self.own / ROOT_CAUSE
            if self._failure(self.own) is not None:
                return known
            _set_aside(self.own)
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
            if isinstance(error, TrainerError) and error.rank is not None:
                cause["rank"] = error.rank
            try:
                (self._reserve or Reserve(self.own)).write_json(path, cause)
            except OSError as problem:  # the log may be on another disk
                to_log(f"{path.name} cannot be written: {problem}\n")
        return known

    def listen(self) -> None:
        """From now on SIGTERM, SIGINT and SIGHUP end the run at its next `beat`, and an exception in any
        thread but a tracker's at once. Room for the root cause is kept on the disk.

        A second signal, two seconds later or more, ends the process immediately. SIGUSR1 ends nothing:
        faulthandler writes all threads' stacks into `stacks-<pid>.txt` in the run's folder, also while Python
        itself hangs. Main thread only.
        """

        self._signals = StopSignals()
        self._reserve = Reserve(self.own)
        threading.excepthook = self._thread_failed
        self._stacks = (self.folder / f"stacks-{os.getpid()}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def _thread_failed(self, details: threading.ExceptHookArgs) -> None:
        """A dead thread would leave the others waiting for it for ever."""
        error = details.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        name = details.thread.name if details.thread else "?"
        if threw(error):
            to_log(f"WARNING: thread {name} of a tracker failed; the run goes on: {error}\n")
            return
        known = self.fail(error)
        text = "".join(traceback.format_exception(error))
        to_log(f"thread {name} failed; the run ends\n{text}{failures.words(known)}\n")
        # Not sys.exit: that would end this thread only, and wait for others at the interpreter's exit.
        os._exit(70)


def _set_aside(folder: Path) -> None:
    with suppress(FileNotFoundError):
        (folder / ROOT_CAUSE).rename(folder / "root_cause_before.json")
