"""Why a process failed: root_cause.json, of its first failure."""

from __future__ import annotations

import json
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from trainer import failures
from trainer.errors import TrainerError
from trainer.failures import KnownFailure
from trainer.writing import Reserve, stamp, to_log

ROOT_CAUSE = "root_cause.json"


class RootCause:
    """The root cause in a folder. One that an earlier life of the run has left there is none of this life."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._path = folder, folder / ROOT_CAUSE
        self._before = stamp(self._path)  # its time tells nothing: the clock may have been set since
        self._reserve: Reserve | None = None
        self._writing = threading.Lock()

    def keep_room(self) -> None:
        """Of the disk, for a failure of this process."""
        self._reserve = Reserve(self.folder)

    def told(self) -> str | None:
        """The error of a root cause that was written since this process began."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            cause = json.loads(self._path.read_text(encoding="utf-8"))
            if stamp(self._path) != self._before:
                return str(cause["error"])
        return None

    def set_aside(self) -> None:
        """What is there is history."""
        with suppress(FileNotFoundError):
            self._path.rename(self.folder / "root_cause_before.json")

    def write(self, error: BaseException, phase: str, step: int | None) -> tuple[KnownFailure, ...]:
        """Write why, and which known failures it is; those are returned, for the log.

        The first failure is kept: what follows it is usually a consequence. That of an earlier life is none.
        """
        known = failures.of_error(error)
        with self._writing:
            if self.told() is not None:
                return known
            self.set_aside()
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            cause = {
                "error": f"{type(error).__name__}: {error}",
                "where": where,
                "traceback": "".join(traceback.format_exception(error)),
                "phase": phase,
                "step": step,
                "known": failures.as_json(known),
                "wall": time.time(),
            }
            if isinstance(error, TrainerError) and error.rank is not None:
                cause["rank"] = error.rank
            try:
                (self._reserve or Reserve(self.folder)).write_json(self._path, cause)
            except OSError as problem:  # the log may be on another disk
                to_log(f"{self._path.name} cannot be written: {problem}\n")
        return known
