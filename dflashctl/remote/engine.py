"""What an engine is: run argv with stdin, put a file, get a file, and "is it there?"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from dflashctl.config.hosts import Host
from dflashctl.errors import DflashError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

Place = Literal["inside", "host"]

Stdin = bytes | Iterable[bytes]
"""What a command reads: bytes, or pieces that are sent as they come (their iterator may wait)."""


@dataclass(frozen=True)
class Completed:
    """A finished remote command. exit_code is what the transport reported: 0 can be trusted, the rest is a
    hint (255 is also ssh's own failure, 1/126/127/137 are also lxc-attach's)."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes
    seconds: float


class Engine(ABC):
    """A way into a host's container. "Inside" is where the run lives; "on the host" is where the GPUs'
    truth is (the same machine for engines `ssh` and `local`)."""

    has_separate_host: bool = False

    def __init__(self, host: Host) -> None:
        self.host = host

    @abstractmethod
    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Run argv inside, in a clean environment (PATH, HOME, LANG=C.UTF-8 of the host's configuration).

        `on_stdout` is told all of stdout as it comes; only the beginning is then in the answer too, and what
        it raises is raised here.

        Raises Unreachable (no contact, or deadline passed: the command may still be running), ContainerDown,
        HostKeyChanged, NotFound (no such container).
        """

    @abstractmethod
    def run_on_host(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Run argv on the machine that owns the GPUs."""

    @abstractmethod
    def put(
        self,
        source: Path,
        destination: str,
        *,
        mode: int = 0o644,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> None:
        """Copy a local file to an absolute path inside. Unverified: the caller proves it by sha256 inside."""

    @abstractmethod
    def get(
        self, source: str, destination: Path, *, timeout_s: float, progress: Progress | None = None
    ) -> None:
        """Copy an absolute path inside to a local file. Raises NotFound."""

    def explain(self, completed: Completed, where: Place = "inside") -> DflashError | None:
        """Why a command gave no answer, where the way to it (pct, sudo) says so on stderr, whatever else was
        printed; None: the program itself has failed."""
        return None

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """End the connection. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
