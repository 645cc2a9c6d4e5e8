"""A run of several processes: torch's elastic agent starts them, this process watches over them.

The agent notices deaths and asks the others to end. What it cannot see is added here: a rank that lives and
hangs, one that leaves with exit status 0 too early, whose failure was the first; and it ends whoever is left
a few seconds after another's failure (the agent would wait for half a minute). A request to stop is passed on
once, and `stop.json` tells it from an end because a peer has failed, for which the ranks save nothing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.machine import process_start
from trainer.run.stopping import StopSignals
from trainer.run.writing import Reserve, write_json
from trainer.topology.cause import TOLD_TO_END, Trace, merged, root_cause
from trainer.topology.pulse import Pulses, Quiet, Sign

WATCH_S = 0.25
STACKS_S = 1.0  # for the stacks to be written before a hung rank is ended
GONE_S = 3.0  # after a rank is gone, the others have ended by themselves, or have felt the agent's SIGTERM
END_S = 3.0  # more, and whoever is left is ended
SAVE_S = 600.0  # for saving, once a stop was asked for
EXIT_FAILED = 1
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # a collective that fails or times out ends its process
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480",  # for what our own deadlines, which are shorter, cannot see
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "20000",
}
"""What makes NCCL tell of its own hangs; a person's own settings stand."""
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
        self.run, self.ranks = run, ranks
        self.pulses, self.quiet, self.reserve = Pulses(ranks), Quiet(), Reserve(run)
        self.hung: dict[int, float] = {}
        self.gone: dict[int, float] = {}  # before they were done: when it was seen
        self.ended: set[int] = set()  # by this process, after another's failure
        self.deaths: dict[int, tuple[int, float]] = {}  # exit code and time, as the agent saw it
        self.first_gone, self.sent = float("inf"), set[signal.Signals]()
        self.written: dict[str, Any] | None = None  # the run's heartbeat
        self._result: BaseException | None = None
        for rank in range(ranks):
            rank_folder(run, rank).mkdir(parents=True, exist_ok=True)
            for name in ("heartbeat.json", "root_cause.json", DOOR):
                (rank_folder(run, rank) / name).unlink(missing_ok=True)
        (run / "stop.json").unlink(missing_ok=True)

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
                self._signal(signs, signal.SIGTERM)
            if time.monotonic() > deadline:
                self._signal(signs, signal.SIGKILL)
            self._end_hung(signs)
            if asked is None:
                self._end_left(signs)
        self._write_merged()
        try:
            return self._outcome(asked)
        finally:
            self.pulses.close()

    def _agent(self, argv: list[str]) -> None:
        """In a thread, so that signals stay ours."""
        from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        for name, value in {
            "OMP_NUM_THREADS": "1",
            **NCCL,
            "TORCH_FR_DUMP_TEMP_FILE": str(self.run / "ranks" / "nccl-trace-"),
        }.items():
            os.environ.setdefault(name, value)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            logs_specs=DefaultLogsSpecs(log_dir=str(self.run / "ranks")),
            run_id=self.run.name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)(*argv)
        except ChildFailedError as error:
            for rank, failure in error.failures.items():
                self.deaths[rank] = (failure.exitcode, float(failure.timestamp))
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
        beat = merged(self._beats(), self.ranks)
        if beat is not None and beat != self.written:
            with suppress(OSError):  # a full disk; the ranks say so
                write_json(self.run / "heartbeat.json", beat, to_disk=False)
                self.written = beat

    def _write_stop(self, name: str) -> None:
        with suppress(OSError):  # on a full disk the ranks cannot save either
            self.reserve.write_json(self.run / "stop.json", {"signal": name, "wall": time.time()})

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
        self._signal(signs, signal.SIGUSR1)
        time.sleep(STACKS_S)
        for rank, seconds in hung.items():
            self.hung[rank] = seconds
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
        if asked is not None:
            print("error: stopped by a signal", file=sys.stderr, flush=True)
            return asked
        if self._result is not None:
            raise self._result
        cause = root_cause(traces)
        if cause is None:
            return 0
        path = self.run / "root_cause.json"
        try:
            self.reserve.write_json(path, cause)
        except OSError as problem:
            print(f"{path} cannot be written: {problem.strerror}", file=sys.stderr, flush=True)
        rank = cause["rank"]
        if not traces[rank].error:  # otherwise the rank has said it
            print(f"error: {cause['error']}", file=sys.stderr, flush=True)
        print(
            f"the run failed: {cause['error'].splitlines()[0]} (rank {rank}; {path})",
            file=sys.stderr,
            flush=True,
        )
        code = self.deaths.get(rank, (EXIT_FAILED, 0.0))[0]
        return code if code > 0 else EXIT_FAILED

    def _trace(self, rank: int) -> Trace:
        sign, error = self.pulses.read().get(rank, {}), None
        with suppress(OSError, ValueError):
            error = json.loads((rank_folder(self.run, rank) / "root_cause.json").read_text())
        # The agent tells of every rank that did not end well; the others left with exit status 0.
        code, at = self.deaths.get(rank, (0, None))
        if code == -signal.SIGKILL and rank in self.ended:
            code = TOLD_TO_END[0]
        phase, step = str(sign.get("phase", "")), sign.get("step")
        return Trace(rank, code, error, phase, step, self.hung.get(rank), self.gone.get(rank, at))


def _alive(beat: dict[str, Any]) -> bool:
    """Whether the process that wrote the heartbeat still runs: the same pid, started at the same tick."""
    return process_start(int(beat["pid"])) == beat.get("start")


def _send(beat: dict[str, Any], number: signal.Signals) -> None:
    if _alive(beat):
        try:
            os.kill(int(beat["pid"]), number)
        except ProcessLookupError:
            pass
