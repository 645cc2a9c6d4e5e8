"""push and pull: the copy itself, inside a worker (docs/pct.md#push, #pull).

Everything is done by the same system calls in the same order as the real tool, so that the ugly outcomes come
about by themselves: opened with O_TRUNC in place, an unchecked copy that ends silently on a full disk or a
directory, an emptied file when source and destination are one.
"""

from __future__ import annotations

import os
import stat

from dflashctl.lab.pct import namespaces
from dflashctl.lab.pct.errors import AttachError, Die
from dflashctl.lab.pct.output import err

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dflashctl.lab.pct.state import State

BUFFER = 2 * 1024 * 1024
SMALLEST_BUFFER = 1024


class Ownership:
    """--perms, --user and --group as given; None where not given."""

    def __init__(self, perms: str | None, user: str | None, group: str | None) -> None:
        # Octal is the default, so a 0 is put in front: `755` is 0755, `x1ed` becomes hexadecimal, `` becomes
        # 0.
        self.perms = perms if perms is None or perms.startswith("0") else "0" + perms
        self.user = user
        self.group = group


def push(
    init_pid: int, unprivileged: bool, source: str, destination: str, ownership: Ownership, state: State
) -> None:
    """Copy a file of the host into the container. Raises Die; returns as if all were well when the copy is
    cut."""
    try:
        source_fd = os.open(source.encode(), os.O_RDONLY)
    except OSError:
        raise Die(f"failed to open {source} for reading\n") from None
    _enter(init_pid, as_root_inside=unprivileged)
    destination_fd = create_file(destination, ownership)
    copy(source_fd, destination_fd, state.at("push copy"))


def pull(init_pid: int, source: str, destination: str, ownership: Ownership, state: State) -> None:
    """Copy a file of the container to the host. The destination is emptied before the source is looked at."""
    destination_fd = create_file(destination, ownership)
    _enter(init_pid, as_root_inside=False)
    try:
        source_fd = os.open(source.encode(), os.O_RDONLY)
    except OSError as error:
        raise Die(f"failed to open {source}: {os.strerror(error.errno or 0)}\n") from None
    copy(source_fd, destination_fd, state.at("pull copy"))


def _enter(init_pid: int, *, as_root_inside: bool) -> None:
    """Into the container's mount namespace and, for push to an unprivileged one, its user namespace."""
    try:
        handles = namespaces.open_all(init_pid)
    except AttachError:
        raise Die("failed to open the container's mount namespace\n") from None
    in_user = False
    try:
        try:
            namespaces.join(handles, "mnt")
        except PermissionError:
            # Only root of the parent user namespace may go in directly; without root the container's own user
            # namespace comes first.
            namespaces.join(handles, "user", "mnt")
            in_user = True
    except OSError:
        raise Die("failed to enter the container's mount namespace\n") from None
    os.chdir("/")
    if as_root_inside:
        try:
            if not in_user:
                if "user" not in handles:
                    raise OSError
                namespaces.join(handles, "user")
        except OSError:
            raise Die("failed to enter the container's user namespace\n") from None
        os.setgid(0)
        os.setuid(0)


def create_file(path: str, ownership: Ownership) -> int:
    """Open the destination for writing. A new file gets --perms or 0666 without the caller's umask; an
    existing one is emptied in place and keeps mode and owner unless told otherwise. Names are looked up in
    /etc/passwd and /etc/group of whatever mount namespace this is called in."""
    uid = _number(ownership.user, "/etc/passwd", "uid")
    gid = _number(ownership.group, "/etc/group", "gid")
    mode = None if ownership.perms is None else _mode(ownership.perms)
    raw = path.encode()
    try:
        fd = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0)
        if mode is None:
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask
    except OSError:
        try:
            fd = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise Die(f"failed to create file: {path}: {os.strerror(error.errno or 0)}\n") from None
    if mode is not None:
        try:
            os.fchmod(fd, mode & 0o7777)
        except OSError:
            pass  # not checked
    if uid is not None or gid is not None:
        now = os.fstat(fd)
        try:
            os.fchown(fd, now.st_uid if uid is None else uid, now.st_gid if gid is None else gid)
        except OSError as error:
            raise Die(f"failed to change file owner: {os.strerror(error.errno or 0)}\n") from None
        except OverflowError:
            raise Die("failed to change file owner: Invalid argument\n") from None
    return fd


def _number(name: str | None, table: str, kind: str) -> int | None:
    if name is None:
        return None
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        with open(table, encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split(":")
                if fields[0] == name and len(fields) > 2 and fields[2].isdigit():
                    return int(fields[2])
    except OSError:
        pass
    raise Die(f"failed to get {kind} for: {name}\n")


def _mode(text: str) -> int:
    """strtoul(3) with base 0: a leading 0 is octal, 0x hexadecimal. Anything left over, or too large, is
    refused."""
    digits, base = (text[2:], 16) if text[:2] in ("0x", "0X") else (text, 8)
    allowed = "0123456789abcdefABCDEF" if base == 16 else "01234567"
    if not digits or any(character not in allowed for character in digits) or int(digits, base) >= 1 << 64:
        raise Die(f"invalid mode: '{text}'\n")
    return int(digits, base)


def copy(source: int, destination: int, caller: str) -> None:
    """Perl's File::Copy between two open files, its result ignored as pct ignores it. Returns on any
    error."""
    have, into = os.fstat(source), os.fstat(destination)
    if (have.st_dev, have.st_ino) == (into.st_dev, into.st_ino) and not stat.S_ISFIFO(have.st_mode):
        names = " and ".join(f"'GLOB({id(info):#x})'" for info in (have, into))
        err(f"{names} are identical (not copied) {caller}.\n")
        return
    size = min(have.st_size, BUFFER) if have.st_size >= 512 else SMALLEST_BUFFER
    try:
        while data := os.read(source, size):
            while data:
                data = data[os.write(destination, data) :]
    except OSError:
        return
