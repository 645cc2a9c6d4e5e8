"""Files over sftp: straight to their place, or through a private folder on the host that is always removed
again."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import paramiko

from dflashctl.errors import NotFound, Unreachable, UsageError, VerificationFailed
from dflashctl.remote.connection import SshConnection
from dflashctl.remote.engine import Progress

STAGING_PARENT = "/tmp"
STAGING_PREFIX = "dflashctl-"
FORGOTTEN_AFTER_S = 24 * 3600
"""A staging folder of our own user that is older than this was left by a connection that broke."""

CLEANING_S = 10.0

log = logging.getLogger("dflashctl.remote")


@contextlib.contextmanager
def staging(connection: SshConnection, *, timeout_s: float) -> Iterator[tuple[paramiko.SFTPClient, str]]:
    """An sftp session and the path of a file that may be written in a fresh 0700 folder with a name that
    nobody can guess. Folder and file are gone afterwards, whatever happened, as long as there is contact.

    Raises Unreachable, VerificationFailed (the host's disk is full, or may not be written to).
    """
    folder = f"{STAGING_PARENT}/{STAGING_PREFIX}{secrets.token_hex(16)}"
    path = f"{folder}/file"
    with contextlib.closing(connection.sftp(timeout_s=timeout_s)) as sftp:
        with words(connection, f"cannot make {folder} on the host"):
            sftp.mkdir(folder, 0o700)
        try:
            yield sftp, path
        finally:
            _remove(connection, folder, path)


def _remove(connection: SshConnection, folder: str, path: str) -> None:
    """In a session of its own: the one before may just have broken off in the middle of a file."""
    try:
        with contextlib.closing(connection.sftp(timeout_s=CLEANING_S)) as sftp:
            with contextlib.suppress(FileNotFoundError):
                sftp.remove(path)
            sftp.rmdir(folder)
            _remove_forgotten(sftp)
    except (Unreachable, paramiko.SSHException, EOFError, OSError) as error:
        log.debug("%s: %s stays on the host: %s", connection.target.label, folder, error)


def _remove_forgotten(sftp: paramiko.SFTPClient) -> None:
    own = sftp.stat(".").st_uid
    limit = time.time() - FORGOTTEN_AFTER_S
    for entry in sftp.listdir_attr(STAGING_PARENT):
        is_ours = entry.filename.startswith(STAGING_PREFIX) and entry.st_uid == own
        if is_ours and stat.S_ISDIR(entry.st_mode or 0) and (entry.st_mtime or limit) < limit:
            folder = f"{STAGING_PARENT}/{entry.filename}"
            with contextlib.suppress(OSError):
                for name in sftp.listdir(folder):
                    sftp.remove(f"{folder}/{name}")
                sftp.rmdir(folder)


def upload(
    connection: SshConnection,
    sftp: paramiko.SFTPClient,
    source: Path,
    destination: str,
    *,
    mode: int,
    deadline: float,
    progress: Progress | None,
) -> None:
    """Send a file. paramiko compares the size at the end; more is the caller's to prove."""
    with own_file(source, "rb", "read") as file, words(connection, f"cannot write {destination}"):
        size = os.fstat(file.fileno()).st_size
        sftp.putfo(file, destination, size, callback=_step(connection, deadline, progress))
        sftp.chmod(destination, mode)


def download(
    connection: SshConnection,
    sftp: paramiko.SFTPClient,
    source: str,
    destination: Path,
    *,
    deadline: float,
    progress: Progress | None,
) -> None:
    """Fetch a file: beside its place first, then renamed, so `destination` is never half a file."""
    aside = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    try:
        step = _step(connection, deadline, progress)
        what = f"cannot read {source}"
        with own_file(aside, "wb", "write") as file, words(connection, what, missing=source):
            sftp.getfo(source, file, callback=step)
        aside.replace(destination)
    finally:
        aside.unlink(missing_ok=True)


def replace(
    connection: SshConnection,
    source: Path,
    destination: str,
    *,
    mode: int,
    timeout_s: float,
    progress: Progress | None,
) -> None:
    """Send a file to its place on the host itself: written beside it, then renamed over it."""
    deadline = time.monotonic() + timeout_s
    aside = f"{destination}.dflashctl-{secrets.token_hex(8)}"
    with contextlib.closing(connection.sftp(timeout_s=timeout_s)) as sftp:
        try:
            upload(connection, sftp, source, aside, mode=mode, deadline=deadline, progress=progress)
            with words(connection, f"cannot write {destination}"):
                sftp.posix_rename(aside, destination)
        except BaseException:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                sftp.remove(aside)
            raise


def fetch(
    connection: SshConnection, source: str, destination: Path, *, timeout_s: float, progress: Progress | None
) -> None:
    """Fetch a file of the host itself."""
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(connection.sftp(timeout_s=timeout_s)) as sftp:
        download(connection, sftp, source, destination, deadline=deadline, progress=progress)


def _step(
    connection: SshConnection, deadline: float, progress: Progress | None
) -> Callable[[int, int], None]:
    def step(done: int, total: int) -> None:
        connection.alive()
        if time.monotonic() > deadline:
            raise Unreachable("the copy did not end in time", where=connection.target.label)
        if progress is not None:
            progress(done, total)

    return step


@contextlib.contextmanager
def own_file(path: Path, mode: str, verb: str) -> Iterator[IO[bytes]]:
    """A file of the laptop; its errors are of another kind than those of the other side. Raises
    UsageError."""
    try:
        file = path.open(mode)
    except OSError as error:
        raise UsageError(f"cannot {verb} {path}: {error.strerror}", where="this machine") from error
    with file:
        yield file


@contextlib.contextmanager
def words(connection: SshConnection, what: str, *, missing: str | None = None) -> Iterator[None]:
    """Errors of sftp as errors of ours."""
    where = connection.target.label
    try:
        yield
    except FileNotFoundError as error:
        if missing is not None:
            raise NotFound(f"no such file: {missing}", where=where) from error
        raise VerificationFailed(f"{what}: no such folder", where=where) from error
    except TimeoutError as error:
        raise Unreachable(f"{what}: no answer in time", where=where) from error
    except (EOFError, paramiko.SSHException) as error:
        raise Unreachable(f"{what}: the connection was lost ({error})", where=where) from error
    except OSError as error:
        if error.errno in (errno.ECONNRESET, errno.EPIPE) or "closed" in str(error).lower():
            raise Unreachable(f"{what}: the connection was lost ({error})", where=where) from error
        raise VerificationFailed(f"{what}: {error.strerror or error}", where=where) from error
