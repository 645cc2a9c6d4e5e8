"""The processes of a run, watched over by this one; spawn.py starts them.

torch's elastic agent notices deaths and asks the others to end. What it cannot see is added here: a rank
that lives and hangs, one that leaves with exit status 0 too early, whose failure was the first; and it ends
whoever is left a few seconds after another's failure (the agent would wait for half a minute). A request to
stop is passed on once to each, and `stop.json` tells it from an end because a peer has failed, for which the
ranks save nothing.

A run of one process is watched in the same way. It keeps its files in the run's own folder, where nobody puts
them together; with no peers that wait for it, it takes its time to end after an error of its own.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.machine import process_start
from trainer.process.stopping import NUMBERS, StopSignals
from trainer.topology.cause import TOLD_TO_END, Trace, despite_stop, root_cause
from trainer.topology.pulse import Pulses, Quiet, Sign, merged
from trainer.topology.spawn import Deaths, run_alone, run_ranks
from trainer.writing import Reserve, stamp, to_log, write_json

WATCH_S = 0.25
STACKS_BYTES = 16_384  # of them are kept in the root cause
STACKS_S = 1.0  # for the stacks to be written before a hung rank is ended
GONE_S = 3.0  # after a rank is gone, the others have ended by themselves, or have felt the agent's SIGTERM
END_S = 3.0  # more, and whoever is left is ended
SAVE_S = 600.0  # for saving, once a stop was asked for
EXIT_FAILED = 1
STOPPED = tuple(128 + number for number in NUMBERS)
DONE = "done"
DOOR = "door.json"  # where a drafter waits for targets


def rank_folder(run: Path, rank: int) -> Path:
    """Where a rank keeps its own heartbeat and root cause."""
    return run / "ranks" / str(rank)


def stop_asked(run: Path) -> bool:
    """Whether a person asked for the end, and not the failure of a peer."""
    return (run / "stop.json").exists()


class Launcher:
    """One run's ranks, from start to end. Main thread only."""

    def __init__(self, run: Path, ranks: int) -> None:
        self.run, self.ranks, self.alone = run, ranks, ranks == 1
        self.pulses, self.quiet, self.reserve = Pulses(ranks), Quiet(), Reserve(run)
        self.hung: dict[int, tuple[float, float]] = {}  # how long it was quiet, and when that was found
        self.last_sign: dict[int, Sign] = {}  # of one that hung: a signal may wake it up for its last second
        self.gone: dict[int, float] = {}  # before they were done: when it was seen
        self.ended: set[int] = set()  # by this process, after another's failure
        self.deaths: Deaths = {}
        self.first_gone, self.sent = float("inf"), set[signal.Signals]()
        self.told: set[int] = set()  # to stop
        self.stacks: dict[int, str] = {}  # of those that hung
        self.written: dict[str, Any] | None = None  # the run's heartbeat
        self._result: BaseException | None = None
        for rank in range(0 if self.alone else ranks):
            rank_folder(run, rank).mkdir(parents=True, exist_ok=True)
            for name in ("heartbeat.json", "root_cause.json", DOOR):
                (rank_folder(run, rank) / name).unlink(missing_ok=True)
        (run / "stop.json").unlink(missing_ok=True)
        self._history = stamp(self._cause_of(0))  # that of an earlier life of this run is no news

    def __call__(self, argv: Sequence[str]) -> int:
        """Start `python argv` for every rank, and watch until the last has gone. The run's exit code."""
        signals = StopSignals()
        agent = threading.Thread(target=self._agent, args=(list(argv),), name="agent", daemon=True)
        agent.start()
        asked: int | None = None
        deadline = float("inf")
        while agent.is_alive():
            agent.join(WATCH_S)
            self._write_merged()
            signs = self.pulses.read()
            told = signals.take()
            if told is not None and asked is None:
                asked = told[1]
                deadline = time.monotonic() + SAVE_S
                self._write_stop(told[0])
            if asked is not None:
                self._pass_on(signs, signal.Signals(asked - 128))
            if time.monotonic() > deadline:
                self._signal(signs, signal.SIGKILL)
            self._end_hung(signs)
            if asked is None and not self.alone:
                self._end_left(signs)
        self._write_merged()
        try:
            return self._outcome(asked)
        finally:
            self.pulses.close()

    def _agent(self, argv: list[str]) -> None:
        """In a thread, so that signals stay ours."""
        try:
            self.deaths = run_alone(argv) if self.alone else run_ranks(argv, self.run, self.ranks)
        except BaseException as error:
            self._result = error

    def _beats(self) -> list[dict[str, Any]]:
        """The heartbeats that are there, in the order of ranks."""
        found = []
        for rank in range(self.ranks):
            try:
                beat = json.loads((rank_folder(self.run, rank) / "heartbeat.json").read_text())
            except (OSError, ValueError):
                continue
            found.append({**beat, "rank": rank})
        return found

    def _write_merged(self) -> None:
        if self.alone:
            return
        beat = merged(self._beats(), self.ranks)
        if beat is not None and beat != self.written:
            with suppress(OSError):  # a full disk; the ranks say so
                write_json(self.run / "heartbeat.json", beat, to_disk=False)
                self.written = beat

    def _write_stop(self, name: str) -> None:
        if self.alone:
            return  # whatever it is told to do comes from a person
        with suppress(OSError):  # on a full disk the ranks cannot save either
            self.reserve.write_json(self.run / "stop.json", {"signal": name, "wall": time.time()})

    def _pass_on(self, signs: dict[int, Sign], number: signal.Signals) -> None:
        """To each rank once it can hear: a stop may come before its first sign."""
        for rank in signs.keys() - self.told:
            self.told.add(rank)
            _send(signs[rank], number)

    def _signal(self, signs: dict[int, Sign], number: signal.Signals) -> None:
        for sign in signs.values():
            _send(sign, number)

    def _end_hung(self, signs: dict[int, Sign]) -> None:
        hung = {
            rank: seconds
            for rank, seconds in self.quiet.look(time.monotonic(), signs).items()
            if signs[rank]["phase"] != DONE and rank not in self.hung and _alive(signs[rank])
        }
        if not hung:
            return
        found, before = time.time(), {rank: _size(self._stacks_of(signs[rank])) for rank in hung}
        self._signal(signs, signal.SIGUSR1)
        time.sleep(STACKS_S)
        for rank, seconds in hung.items():
            self.hung[rank], self.last_sign[rank] = (seconds, found), signs[rank]
            self.stacks[rank] = _text_from(self._stacks_of(signs[rank]), before[rank])
            _send(signs[rank], signal.SIGKILL)

    def _end_left(self, signs: dict[int, Sign]) -> None:
        """A rank is gone before it was done, or has said why it fails: the others cannot go on, whatever they
        do just now, and it may itself be waiting for a slow disk.
        """
        now = time.time()
        for rank, sign in signs.items():
            said = (rank_folder(self.run, rank) / "root_cause.json").exists()
            if said or (sign["phase"] != DONE and not _alive(sign)):
                self.gone.setdefault(rank, now)
        if not self.gone:
            return
        self.first_gone = min(self.first_gone, time.monotonic())
        since = time.monotonic() - self.first_gone
        number = signal.SIGTERM if since < GONE_S + END_S else signal.SIGKILL
        if since < GONE_S or number in self.sent:
            return
        self.sent.add(number)
        for rank, sign in signs.items():
            if _alive(sign):
                self.ended.add(rank)
                _send(sign, number)

    def _outcome(self, asked: int | None) -> int:
        traces = [self._trace(rank) for rank in range(self.ranks)]
        if self._result is not None:
            raise self._result
        codes = [code for code, _ in self.deaths.values()]
        cause = root_cause(traces) if asked is None else despite_stop(traces)
        if cause is None and asked is not None:
            if asked not in codes:  # nobody has said so
                to_log("error: stopped by a signal\n")
            return asked
        if self.alone and codes and codes[0] in STOPPED:
            return codes[0]  # by a signal to that process itself
        if cause is None:
            return 0
        teller = next((each for each in traces if (each.error or {}).get("error") == cause["error"]), None)
        code = self.deaths.get(cause["rank"] if teller is None else teller.rank, (EXIT_FAILED, 0.0))[0]
        told = teller is not None and code > 0  # by itself, at its end
        if not (self.alone and told):
            self._tell(cause, told)
        if self.alone and code < 0 and not self.hung:
            _end_by(-code)
        return code if code > 0 else EXIT_FAILED

    def _tell(self, cause: dict[str, Any], told: bool) -> None:
        path = self.run / "root_cause.json"
        try:
            self.reserve.write_json(path, cause)
        except OSError as problem:
            to_log(f"{path} cannot be written: {problem.strerror}\n")
        if not told:
            to_log(f"error: {cause['error']}\n")
        to_log(f"the run failed: {cause['error'].splitlines()[0]} (rank {cause['rank']}; {path})\n")

    def _cause_of(self, rank: int) -> Path:
        return (self.run if self.alone else rank_folder(self.run, rank)) / "root_cause.json"

    def _stacks_of(self, sign: Sign) -> Path:
        return self.run / f"stacks-{sign['pid']}.txt"

    def _trace(self, rank: int) -> Trace:
        sign, error = self.last_sign.get(rank) or self.pulses.read().get(rank, {}), None
        path = self._cause_of(rank)
        with suppress(OSError, ValueError):
            if not (self.alone and stamp(path) == self._history):
                error = json.loads(path.read_text())
        # The agent tells of every rank that did not end well; the others left with exit status 0.
        code, at = self.deaths.get(rank, (0, None))
        if code == -signal.SIGKILL and rank in self.ended:
            code = TOLD_TO_END[0]
        phase, step = str(sign.get("phase", "")), sign.get("step")
        hung_s, hung_at = self.hung.get(rank, (None, None))
        stacks, died_at = self.stacks.get(rank, ""), self.gone.get(rank, at)
        return Trace(rank, code, error, phase, step, hung_s, died_at, hung_at, sign.get("deadline_s"), stacks)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text_from(path: Path, start: int) -> str:
    """What was added to a file of stacks."""
    try:
        return path.read_bytes()[start : start + STACKS_BYTES].decode(errors="replace")
    except OSError:
        return ""


def _end_by(number: int) -> None:
    """Be ended by the signal that ended the run's one process: who waits for this one learns the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core worth reading is the other process's
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _alive(beat: dict[str, Any]) -> bool:
    """Whether the process that wrote the heartbeat still runs: the same pid, started at the same tick."""
    return process_start(int(beat["pid"])) == beat.get("start")


def _send(beat: dict[str, Any], number: signal.Signals) -> None:
    if _alive(beat):
        try:
            os.kill(int(beat["pid"]), number)
        except ProcessLookupError:
            pass
