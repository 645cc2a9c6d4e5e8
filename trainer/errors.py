"""The errors of the trainer that a person can cause or mend. One message: what, where, what to do next.

The trainer runs in the container without dflashctl, so it has a small family of its own. `trainer.cli` prints
these without a traceback; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class TrainerError(Exception):
    """What happened, where (key path, file, row), and what to do next."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", next: str = "", rank: int | None = None) -> None:
        """rank: whose fault it is, in a run of several processes; None: no other's than who raises it."""
        super().__init__(what)
        self.what = what
        self.where = where
        self.next = next
        self.rank = rank

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\nnext: {self.next}" if self.next else head


class ConfigError(TrainerError):
    """The recipe, or the pair of target and drafter that it names, cannot work."""

    exit_code = 2


class DataError(TrainerError):
    """The data cannot be used as it is."""


class OutOfMemory(TrainerError):
    """A GPU or the host has no room for what the recipe asks of it."""


class Refused(TrainerError):
    """The start-up self-check found that the run cannot go well: nothing was trained."""

    exit_code = 4


class DoesNotFit(Refused, OutOfMemory):
    """So much memory as a step takes is not there: found before the first one."""


class Stopped(TrainerError):
    """A signal asked the run to end; what could be saved is saved."""

    def __init__(self, signal_name: str, exit_code: int) -> None:
        super().__init__(f"stopped by {signal_name}")
        self.exit_code = exit_code
