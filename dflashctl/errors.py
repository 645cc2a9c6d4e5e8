"""Exit codes and the errors that a person can cause or meet. One message: what, where, what to do next.

Every error that leaves dflashctl on purpose is a DflashError; `cli.main` prints it without a traceback and
exits with its code. Anything else is a bug (exit 1, full traceback in the log file).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The documented exit codes (docs/exit-codes.md)."""

    OK = 0
    BUG = 1
    USAGE = 2
    UNREACHABLE = 3
    VERIFICATION = 4
    GPUS_BUSY = 5
    NOT_FOUND = 6
    RUN_BAD = 7
    LOCKED = 8
    NOT_OURS = 9
    SOME_HOSTS = 10
    HOST_KEY_CHANGED = 11
    CONTAINER_DOWN = 12
    INTERRUPTED = 130


class DflashError(Exception):
    """What happened, where (key path, file:line, host), and what to do next."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, what: str, *, where: str = "", next: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.next = next

    def __str__(self) -> str:
        where = self.where.replace("\n", "\\n").replace("\r", "\\r")  # a folder may have such a name
        head = f"{where}: {self.what}" if where else self.what
        return f"{head}\nnext: {self.next}" if self.next else head


class UsageError(DflashError):
    """Wrong arguments or configuration."""


class Unreachable(DflashError):
    """No contact: nothing is known about the other side, and nothing is claimed."""

    exit_code = ExitCode.UNREACHABLE


class VerificationFailed(DflashError):
    """A deploy did not prove itself, and nothing was switched; or a check of `doctor` failed."""

    exit_code = ExitCode.VERIFICATION


class GpusBusy(DflashError):
    """A GPU that is needed has a holder, holds memory, or cannot be read; or torch sees none for `probe`."""

    exit_code = ExitCode.GPUS_BUSY


class NotFound(DflashError):
    """No such run, release, host, recipe, container or file."""

    exit_code = ExitCode.NOT_FOUND


class RunBad(DflashError):
    """The run failed or is wedged, or a program of `probe` did not answer as expected."""

    exit_code = ExitCode.RUN_BAD


class Locked(DflashError):
    """Somebody else holds the lock, or the tag is in use by a live run."""

    exit_code = ExitCode.LOCKED


class NotOurs(DflashError):
    """Something that is not ours, or that cannot be killed, still holds a GPU."""

    exit_code = ExitCode.NOT_OURS


class SomeHostsFailed(DflashError):
    """Some of several hosts failed; the others were done."""

    exit_code = ExitCode.SOME_HOSTS


class HostKeyChanged(DflashError):
    """The host key differs from the one in known_hosts, or is revoked."""

    exit_code = ExitCode.HOST_KEY_CHANGED


class ContainerDown(DflashError):
    """The container is stopped or frozen."""

    exit_code = ExitCode.CONTAINER_DOWN
