"""The sftp subsystem of the lab's ssh server, over paramiko's. Mends two things that OpenSSH's clients need:
a size set on an open file must not empty it, and the subsystem must end with an exit status."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable
from typing import Any

import paramiko
from paramiko import SFTPAttributes, SFTPHandle, SFTPServer, SFTPServerInterface
from paramiko.sftp import SFTP_FAILURE, SFTP_OK

MAX_READ = 256 * 1024
"""What one read request gets at most (bytes), whatever it asks for: memory stays bounded."""


def set_attributes(path: str | int, attributes: Any) -> None:
    """Apply what the request (SFTPAttributes) names, on a path or an open descriptor."""
    flags = attributes._flags
    if flags & attributes.FLAG_SIZE:
        os.truncate(path, attributes.st_size or 0)
    if flags & attributes.FLAG_UIDGID:
        os.chown(path, attributes.st_uid or 0, attributes.st_gid or 0)
    if flags & attributes.FLAG_PERMISSIONS:
        os.chmod(path, (attributes.st_mode or 0) & 0o7777)
    if flags & attributes.FLAG_AMTIME:
        os.utime(path, (attributes.st_atime or 0, attributes.st_mtime or 0))


def status_of(action: Callable[[], Any]) -> int:
    """Do it; the result as an sftp status."""
    try:
        action()
    except OSError as error:
        return SFTPServer.convert_errno(error.errno or 0)
    return SFTP_OK


class Handle(SFTPHandle):
    """An open file. Reads and writes go straight to the descriptor, at the request's offset."""

    def __init__(self, fd: int, flags: int) -> None:
        super().__init__(flags)
        self._fd = fd
        self._append = bool(flags & os.O_APPEND)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def read(self, offset: int, length: int) -> bytes | int:
        try:
            return os.pread(self._fd, min(length, MAX_READ), offset)
        except OSError as error:
            return SFTPServer.convert_errno(error.errno or 0)

    def write(self, offset: int, data: Any) -> int:
        rest = memoryview(data)
        try:
            while rest:
                done = os.write(self._fd, rest) if self._append else os.pwrite(self._fd, rest, offset)
                rest, offset = rest[done:], offset + done
        except OSError as error:
            return SFTPServer.convert_errno(error.errno or 0)
        return SFTP_OK

    def stat(self) -> SFTPAttributes | int:
        try:
            return SFTPAttributes.from_stat(os.fstat(self._fd))
        except OSError as error:
            return SFTPServer.convert_errno(error.errno or 0)

    def chattr(self, attr: SFTPAttributes) -> int:
        return status_of(lambda: set_attributes(self._fd, attr))


class Files(SFTPServerInterface):
    """The host's file system; relative paths start at the home."""

    def __init__(self, server: paramiko.ServerInterface, home: str) -> None:
        super().__init__(server)
        self._home = home

    def _path(self, path: str) -> str:
        return posixpath.join(self._home, path)

    def canonicalize(self, path: str) -> str:
        return os.path.realpath(self._path(path))

    def list_folder(self, path: str) -> list[SFTPAttributes] | int:
        found = []
        try:
            with os.scandir(self._path(path)) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed while we read
                        found.append(SFTPAttributes.from_stat(entry.stat(follow_symlinks=False), entry.name))
        except OSError as error:
            return SFTPServer.convert_errno(error.errno or 0)
        return found

    def stat(self, path: str) -> SFTPAttributes | int:
        return self._stat(path, follow=True)

    def lstat(self, path: str) -> SFTPAttributes | int:
        return self._stat(path, follow=False)

    def _stat(self, path: str, *, follow: bool) -> SFTPAttributes | int:
        try:
            return SFTPAttributes.from_stat(os.stat(self._path(path), follow_symlinks=follow))
        except OSError as error:
            return SFTPServer.convert_errno(error.errno or 0)

    def open(self, path: str, flags: int, attr: SFTPAttributes) -> Handle | int:
        mode = attr.st_mode if attr is not None and attr.st_mode is not None else 0o666
        try:
            fd = os.open(self._path(path), flags | os.O_CLOEXEC, mode & 0o7777)
        except OSError as error:
            return SFTPServer.convert_errno(error.errno or 0)
        return Handle(fd, flags)

    def remove(self, path: str) -> int:
        return status_of(lambda: os.remove(self._path(path)))

    def rename(self, oldpath: str, newpath: str) -> int:
        """As sftp's version 3 has it: never over an existing file."""
        if os.path.lexists(self._path(newpath)):
            return SFTP_FAILURE
        return self.posix_rename(oldpath, newpath)

    def posix_rename(self, oldpath: str, newpath: str) -> int:
        return status_of(lambda: os.replace(self._path(oldpath), self._path(newpath)))

    def mkdir(self, path: str, attr: SFTPAttributes) -> int:
        mode = attr.st_mode if attr is not None and attr.st_mode is not None else 0o777
        return status_of(lambda: os.mkdir(self._path(path), mode & 0o7777))

    def rmdir(self, path: str) -> int:
        return status_of(lambda: os.rmdir(self._path(path)))

    def chattr(self, path: str, attr: SFTPAttributes) -> int:
        return status_of(lambda: set_attributes(self._path(path), attr))

    def symlink(self, target_path: str, path: str) -> int:
        return status_of(lambda: os.symlink(target_path, self._path(path)))

    def readlink(self, path: str) -> str | int:
        try:
            return os.readlink(self._path(path))
        except OSError as error:
            return SFTPServer.convert_errno(error.errno or 0)


class Subsystem(SFTPServer):
    """paramiko's sftp session, ended the way OpenSSH's scp wants it."""

    def finish_subsystem(self) -> None:
        channel: Any = self.sock
        with contextlib.suppress(Exception):  # the client may be gone, which is as good an end
            channel.send_exit_status(0)
        super().finish_subsystem()
