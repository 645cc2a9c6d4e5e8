"""Engine `ssh`: a bare machine, no container."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflashctl.config.hosts import Host
from dflashctl.errors import DflashError, NotFound, Unreachable, UsageError, VerificationFailed
from dflashctl.remote import pct_messages, transfer
from dflashctl.remote.channel import CallTimeout
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.engine import Completed, Engine, Place, Progress, Stdin
from dflashctl.remote.hops import Target, target_of
from dflashctl.remote.limits import check_argv
from dflashctl.remote.pct import completed, with_environment


class SshEngine(Engine):
    """Commands and files on the machine that ssh reaches; with ssh.sudo as root, through `sudo -n`."""

    def __init__(self, host: Host, target: Target | None = None) -> None:
        super().__init__(host)
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
        check_argv(argv)
        words = with_environment(self.host, argv)
        if self.sudo:
            words = ["sudo", "-n", "--", *words]
        started = time.monotonic()
        try:
            finished = self.connection.run(words, stdin=stdin, timeout_s=timeout_s, on_stdout=on_stdout)
        except CallTimeout:
            raise Unreachable(
                f"{argv[0]} did not end within {timeout_s:g} s; it may still be running",
                where=self.host.name,
            ) from None
        done = completed(argv, finished, started)
        if done.exit_code != 0 and not done.stdout and (error := self.explain(done)):
            raise error
        return done

    def explain(self, completed: Completed, where: Place = "inside") -> DflashError | None:
        text = completed.stderr.decode("utf-8", "replace")
        return pct_messages.classify_sudo(text, self.host.name) if self.sudo else None

    def run_on_host(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        return self.run(argv, stdin=stdin, timeout_s=timeout_s, on_stdout=on_stdout)

    def put(
        self,
        source: Path,
        destination: str,
        *,
        mode: int = 0o644,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> None:
        _check_path(destination)
        deadline = time.monotonic() + timeout_s
        if self.sudo:
            with transfer.staging(self.connection, timeout_s=timeout_s) as (sftp, staged):
                transfer.upload(
                    self.connection, sftp, source, staged, mode=0o600, deadline=deadline, progress=progress
                )
                install = ["install", "-m", f"{mode:04o}", "-T", "--", staged, destination]
                done = self.run(install, timeout_s=max(deadline - time.monotonic(), 1.0))
            if done.exit_code != 0:
                said = done.stderr.decode("utf-8", "replace").strip()
                raise VerificationFailed(f"cannot write {destination}: {said}", where=self.host.name)
            return
        transfer.replace(
            self.connection,
            source,
            destination,
            mode=mode,
            timeout_s=timeout_s,
            progress=progress,
        )

    def get(
        self, source: str, destination: Path, *, timeout_s: float, progress: Progress | None = None
    ) -> None:
        _check_path(source)
        deadline = time.monotonic() + timeout_s
        if not self.sudo:
            transfer.fetch(self.connection, source, destination, timeout_s=timeout_s, progress=progress)
            return
        with transfer.staging(self.connection, timeout_s=timeout_s) as (sftp, staged):
            # Made by the ssh user, so that root's copy is written into a file that this user may read.
            with transfer.words(self.connection, f"cannot write {staged} on the host"):
                sftp.open(staged, "x").close()
            copy = self.run(["cp", "--", source, staged], timeout_s=timeout_s)
            if copy.exit_code != 0:
                said = copy.stderr.decode("utf-8", "replace").strip()
                if said.endswith("No such file or directory"):
                    raise NotFound(f"no such file: {source}", where=self.host.name)
                raise VerificationFailed(f"cannot read {source}: {said}", where=self.host.name)
            transfer.download(
                self.connection, sftp, staged, destination, deadline=deadline, progress=progress
            )

    def close(self) -> None:
        self.connection.close()


def _check_path(path: str) -> None:
    if not path.startswith("/"):
        raise UsageError(f"not an absolute path: {path!r}")
    check_argv([path])
