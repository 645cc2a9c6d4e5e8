"""The files of a run that the trainer writes: heartbeat, metrics, summary, root cause. Formats:
docs/run-folder.md.

The heartbeat is written by the main thread alone, from `beat()` calls inside its loops. A thread of its own
would go on beating while the main thread hangs, and a wedged run would look alive.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer import failures
from trainer.errors import Stopped
from trainer.failures import KnownFailure
from trainer.machine import process_start
from trainer.process.pace import Pace
from trainer.process.rootcause import RootCause
from trainer.process.stopping import StopSignals
from trainer.process.trackers import threw
from trainer.writing import append_line, make_folder, to_log, write_json

BEAT_EVERY_S = 1.0
TELL_EVERY_S = 60.0


class RunFiles:
    """One run's folder, and the run's place in time: phase, step, and whether somebody asked it to stop."""

    def __init__(self, folder: Path, own: Path | None = None) -> None:
        """own: where this process's heartbeat and root cause go, if it is one of several of the run."""
        self.folder, self.own = folder, own or folder
        make_folder(self.own)
        self.step: int | None = None
        self.total_steps: int | None = None
        self.metrics: dict[str, float] = {}
        self.queues: dict[str, int] = {}  # depths, by name
        self.waited: dict[str, float] = {}  # seconds so far, by what was waited for
        self.peaks: dict[str, float] = {}  # the most memory so far in GiB, by device
        self.started = time.monotonic()
        self.pace = Pace(self.started)
        self._last_beat = float("-inf")
        self._cause, self._cause_of_run = RootCause(self.own), RootCause(self.folder)
        self._signals: StopSignals | None = None
        self._told_of_disk = float("-inf")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def enter(self, phase: str) -> None:
        """Begin a phase; it is in the heartbeat and in events.jsonl at once."""
        now = time.monotonic()
        self.pace.enter(phase, now)
        self._append("events.jsonl", {"at": time.time(), "mono": now, "event": "phase", "phase": phase})
        self.beat(force=True)

    def stepped(self, step: int) -> None:
        """A training step is done."""
        self._count(step)
        self.beat()

    def _count(self, step: int) -> None:
        """The step, and the time that it took."""
        self.pace.stepped(time.monotonic())
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

    def failed_peer(self) -> str | None:
        """The error of another process of this run, if one has failed since this one began."""
        return self._cause_of_run.told()

    def forget_failure(self) -> None:
        """This run goes on in a folder where it failed once: that root cause is history."""
        self._cause_of_run.set_aside()

    def write_text(self, name: str, text: str) -> None:
        """A small file for people."""
        path = self.folder / name
        self._write(path, lambda: path.write_text(text, encoding="utf-8"))

    def _sign(self, now: float) -> dict[str, Any]:
        """Who this process is, and where: what others decide by."""
        return {
            "pid": os.getpid(),
            "start": process_start(os.getpid()),
            "phase": self.pace.phase,
            "step": self.step,
            "mono": now,
            "deadline_s": self.pace.deadline_s,
        }

    def _write_heartbeat(self, now: float) -> None:
        median = self.pace.median_step_s
        path = self.own / "heartbeat.json"
        beat = {
            **self._sign(now),
            "total_steps": self.total_steps,
            "wall": time.time(),
            "phase_since": self.pace.phase_since,
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
        known = {"step": self.step, "wall": time.time(), "phase": self.pace.phase}
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
        """Write the root cause, unless it stands already; the known failures that it is, for the log."""
        return self._cause.write(error, self.pace.phase, self.step)

    def listen(self) -> None:
        """From now on SIGTERM, SIGINT and SIGHUP end the run at its next `beat`, and an exception in any
        thread but a tracker's at once. Room for the root cause is kept on the disk.

        A second signal, two seconds later or more, ends the process immediately. SIGUSR1 ends nothing:
        faulthandler writes all threads' stacks into `stacks-<pid>.txt` in the run's folder, also while Python
        itself hangs. Main thread only.
        """

        self._signals = StopSignals()
        self._cause.keep_room()
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
