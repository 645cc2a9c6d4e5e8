"""Engine `pct`: ssh to a Proxmox host, and `pct` from there into the container.

What `pct` does and does not promise decides the code here: `pct exec` runs argv without a shell but with
the host's environment (hence env -i), `pct push` and `pct pull` exit with 0 also when they failed (hence:
the caller's sha256 is the proof, the words on stderr are the reason), a frozen container makes exec hang
(hence a look at the freezer after a deadline).
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflashctl.config.hosts import Host
from dflashctl.errors import ContainerDown, DflashError, NotFound, Unreachable, UsageError, VerificationFailed
from dflashctl.remote import pct_messages, transfer
from dflashctl.remote.channel import CallTimeout, Finished
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.engine import Completed, Engine, Place, Progress, Stdin
from dflashctl.remote.environment import clean_environment
from dflashctl.remote.freezer import is_frozen
from dflashctl.remote.hops import Target, target_of
from dflashctl.remote.limits import check_argv

LOCK_WAIT_S = 60.0
"""How long a push or pull keeps trying while another one holds the container's lock (pct itself waits 10
s)."""

PROBE_S = 10.0
SIGNAL_HINT = 255
"""What `exit_code` says when a signal ended the command over there: ssh names no code then."""

_ATTACH = re.compile(r"^lxc-attach: ", re.MULTILINE)

log = logging.getLogger("dflashctl.remote")


class PctEngine(Engine):
    """Commands and files into container `host.container` of a Proxmox host."""

    has_separate_host = True

    def __init__(self, host: Host, target: Target | None = None) -> None:
        super().__init__(host)
        if host.container is None:
            raise UsageError("engine pct needs the key 'container'", where=f"hosts.{host.name}")
        self.container = host.container
        self.sudo = bool(host.ssh and host.ssh.sudo)
        self.connection = SshConnection(target or target_of(host))

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        check_argv(argv, ascii_only=True)
        inside = ["pct", "exec", str(self.container), "--", *with_environment(self.host, argv)]
        started = time.monotonic()
        try:
            finished = self._host_command(
                inside,
                stdin=stdin,
                timeout_s=timeout_s,
                on_stdout=on_stdout,
                on_quiet=self._raise_if_frozen,
            )
        except CallTimeout:
            self._raise_if_frozen()
            raise self._after_deadline(argv[0], timeout_s) from None
        done = completed(argv, finished, started)
        # pct prints nothing on stdout when it fails by itself: what is there is the program's, and so are
        # its words, unless nobody can make sense of them (agent_call).
        if done.exit_code != 0 and not done.stdout and (error := self.explain(done)):
            raise error
        return done

    def run_on_host(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        check_argv(argv)
        started = time.monotonic()
        try:
            finished = self._host_command(argv, stdin=stdin, timeout_s=timeout_s, on_stdout=on_stdout)
        except CallTimeout:
            raise Unreachable(
                f"{argv[0]} on the host did not end within {timeout_s:g} s; it may still be running",
                where=self.host.name,
            ) from None
        return completed(argv, finished, started)

    def put(
        self,
        source: Path,
        destination: str,
        *,
        mode: int = 0o644,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> None:
        check_path(destination)
        deadline = time.monotonic() + timeout_s
        with transfer.staging(self.connection, timeout_s=timeout_s) as (sftp, staged):
            transfer.upload(
                self.connection, sftp, source, staged, mode=0o600, deadline=deadline, progress=progress
            )
            push = ["pct", "push", str(self.container), staged, destination, "--perms", f"{mode:04o}"]
            said = self._locked_command(push, deadline)
        if said:
            raise VerificationFailed(f"pct push to {destination}: {said}", where=self.host.name)

    def get(
        self, source: str, destination: Path, *, timeout_s: float, progress: Progress | None = None
    ) -> None:
        check_path(source)
        deadline = time.monotonic() + timeout_s
        with transfer.staging(self.connection, timeout_s=timeout_s) as (sftp, staged):
            # Readable for the ssh user where sudo runs pct; the folder keeps everybody else out.
            pull = ["pct", "pull", str(self.container), source, staged, "--perms", "0644"]
            said = self._locked_command(pull, deadline)
            if said.endswith("No such file or directory"):
                raise NotFound(f"no such file: {source}", where=self.host.name)
            if said:
                raise VerificationFailed(f"pct pull of {source}: {said}", where=self.host.name)
            transfer.download(
                self.connection, sftp, staged, destination, deadline=deadline, progress=progress
            )
        self._verify_pulled(source, destination, max(deadline - time.monotonic(), PROBE_S))

    def close(self) -> None:
        self.connection.close()

    def _host_command(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
        on_quiet: Callable[[], None] | None = None,
    ) -> Finished:
        words = ["sudo", "-n", "--", *argv] if self.sudo else argv
        return self.connection.run(
            words, stdin=stdin, timeout_s=timeout_s, on_stdout=on_stdout, on_quiet=on_quiet
        )

    def _locked_command(self, argv: Sequence[str], deadline: float) -> str:
        """Run push or pull, again while its lock is held; returns what it said on stderr ("" for nothing)."""
        give_up = min(deadline, time.monotonic() + LOCK_WAIT_S)
        while True:
            left = deadline - time.monotonic()
            try:
                finished = self._host_command(argv, timeout_s=max(left, 0.1))
            except CallTimeout:
                self._raise_if_frozen()
                raise self._after_deadline(" ".join(argv[:2]), left) from None
            text = finished.stderr.decode("utf-8", "replace").strip()
            if finished.exit_status == 0:
                return re.sub(r"\Atrying to acquire lock\.\.\.\s*OK\s*", "", text).strip()
            pause = random.uniform(0.2, 1.0)
            if pct_messages.is_lock_timeout(text) and time.monotonic() + pause < give_up:
                log.debug("%s: the container's lock is held, trying again", self.host.name)
                time.sleep(pause)
                continue
            error = self._classify(text)
            if error is not None:
                raise error
            raise VerificationFailed(
                f"{' '.join(argv[:2])} failed (exit {finished.exit_status}): {text or 'no word about why'}",
                where=self.host.name,
            )

    def _classify(self, stderr: str) -> DflashError | None:
        host = self.host
        return pct_messages.classify(
            stderr, container=self.container, where=host.name, sudo=self.sudo, engine=host.engine
        )

    def explain(self, completed: Completed, where: Place = "inside") -> DflashError | None:
        text = completed.stderr.decode("utf-8", "replace")
        if where == "host":
            return pct_messages.classify_sudo(text, self.host.name) if self.sudo else None
        error = self._classify(text)
        if error is None and (_ATTACH.search(text) or completed.exit_code in (137, SIGNAL_HINT)):
            return self._down()
        return error

    def _down(self) -> DflashError | None:
        """lxc-attach lost the container, or something killed the command: perhaps the container was
        stopped."""
        try:
            status = self._host_command(["pct", "status", str(self.container)], timeout_s=PROBE_S)
        except (CallTimeout, Unreachable):
            return None
        if b"status: stopped" not in status.stdout.splitlines():
            return None
        return ContainerDown(
            f"container {self.container} was stopped",
            where=self.host.name,
            next=pct_messages.starting(self.host.engine, self.container),
        )

    def _after_deadline(self, program: str, timeout_s: float) -> DflashError:
        return Unreachable(
            f"{program} did not end within {timeout_s:g} s; it may still be running"
            f" in container {self.container}",
            where=self.host.name,
        )

    def _raise_if_frozen(self) -> None:
        """A frozen container answers nothing until it is thawed; no need to wait for the deadline then."""
        if self._is_frozen():
            raise ContainerDown(
                f"container {self.container} is frozen: commands in it wait until it is thawed",
                where=self.host.name,
                next=f"on the host: pct resume {self.container} (a backup thaws it when it has ended)",
            )

    def _is_frozen(self) -> bool:
        deadline = time.monotonic() + PROBE_S

        def ask(argv: Sequence[str]) -> bytes:
            return self._host_command(argv, timeout_s=max(deadline - time.monotonic(), 0.1)).stdout

        try:
            return is_frozen(ask, self.container)
        except (CallTimeout, DflashError):
            return False

    def _verify_pulled(self, source: str, destination: Path, timeout_s: float) -> None:
        """pull's exit code proves nothing: compare with a hash from inside."""
        inside = self.run(["sha256sum", "--", source], timeout_s=timeout_s)
        words = inside.stdout.split()
        digest = words[0].lstrip(b"\\").decode("ascii", "replace") if inside.exit_code == 0 and words else ""
        if digest != _sha256(destination):
            destination.unlink(missing_ok=True)
            raise VerificationFailed(
                f"{source} arrived different from what it is inside (cut short, or changed meanwhile)",
                where=self.host.name,
                next="run it again; a file that grows is read with `dflashctl logs`",
            )


def with_environment(host: Host, argv: Sequence[str]) -> list[str]:
    """argv under `env -i`: nothing of the host's or the ssh session's environment reaches the command.

    Raises UsageError for a program whose name `env` would read as a variable, running the next word instead.
    """
    if "=" in argv[0]:
        raise UsageError(
            f"a program's name cannot hold '=': {argv[0]!r}", where=host.name, next="start it through a shell"
        )
    return ["env", "-i", *(f"{name}={value}" for name, value in clean_environment(host).items()), *argv]


def completed(argv: Sequence[str], finished: Finished, started: float) -> Completed:
    code = SIGNAL_HINT if finished.exit_status is None else finished.exit_status
    return Completed(tuple(argv), code, finished.stdout, finished.stderr, time.monotonic() - started)


def check_path(path: str) -> None:
    """A path that pct takes as it is. Raises UsageError."""
    if not path.startswith("/"):
        raise UsageError(f"not an absolute path: {path!r}")
    check_argv([path], ascii_only=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
