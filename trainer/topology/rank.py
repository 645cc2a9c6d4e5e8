"""One process of a run: what it keeps of its own, how it ends, and that it ends with its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from trainer.process.runfiles import RunFiles
from trainer.topology.launcher import SAVE_S, rank_folder, stop_asked
from trainer.topology.pulse import Pulse

PR_SET_PDEATHSIG = 1  # prctl(2)
LAUNCHER = "DFLASH_LAUNCHER"  # its pid
HERE = "here"  # the first rank has not left; removing it works on a full disk too
TOLD_S = 1.5  # for the launcher, which looks four times a second, to write down that a stop was asked for


class WatchedFiles(RunFiles):
    """The run's files, of a process that a launcher watches: the only one of its run, unless it is a rank."""

    def __init__(self, run: Path, rank: int = 0, own: Path | None = None) -> None:
        self._pulse = Pulse(rank)
        super().__init__(run, own)

    def _write_heartbeat(self, now: float) -> None:
        self._pulse.give(self._sign(now))
        super()._write_heartbeat(now)

    def _count(self, step: int) -> None:
        """See `RunFiles`. The launcher hears of every step, so it knows in which one a process was ended; and
        of its time, which sets the deadline: the next beat may come after the hang.
        """
        super()._count(step)
        self._pulse.give(self._sign(time.monotonic()))

    def leave(self) -> None:
        """The last thing that the process does."""


class RankFiles(WatchedFiles):
    """A rank's part of the run's folder: its own heartbeat and root cause. What tells of the whole run
    (metrics, events, summary) is the first rank's to write.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.rank = rank
        super().__init__(run, rank, rank_folder(run, rank))
        if rank == 0:
            (self.own / HERE).touch()

    def _append(self, name: str, value: dict[str, Any]) -> None:
        if self.rank == 0:
            super()._append(name, value)

    def write_text(self, name: str, text: str) -> None:
        if self.rank == 0:
            super().write_text(name, text)

    def summarise(self, *given: Any, **named: Any) -> None:
        if self.rank == 0:
            super().summarise(*given, **named)

    def failed_peer(self) -> str | None:
        """A SIGTERM that nobody asked for comes from the agent, after another rank's failure. One that was
        sent to every process of the run at once may be here before the launcher has said so.
        """
        end = time.monotonic() + TOLD_S
        while not stop_asked(self.folder) and time.monotonic() < end:
            if any(self.folder.glob("ranks/*/root_cause.json")):
                break
            time.sleep(0.05)
        return None if stop_asked(self.folder) else super().failed_peer() or "see root_cause.json"

    def leave(self) -> None:
        """See `WatchedFiles`. The agent takes the first to leave with an error for a failure and ends the
        others, so after a stop they wait until the first rank has saved.
        """
        first = rank_folder(self.folder, 0) / HERE
        if self.rank == 0:
            first.unlink(missing_ok=True)
        elif stop_asked(self.folder):
            end = time.monotonic() + SAVE_S
            while first.exists() and time.monotonic() < end:
                time.sleep(0.1)


def die_with_launcher() -> None:
    """Ask the kernel to end this process with its launcher: left alone it would hold a GPU for ever."""
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it went before we asked
        os._exit(1)
