"""lxc-attach for containers that are plain namespaces: same environment, working folder, exit codes and
messages (docs/pct.md#exec). Where the real lxc-attach exists and the container is LXC's, that one runs
instead."""

from __future__ import annotations

import errno
import os
import signal

from dflashctl.lab.pct import namespaces
from dflashctl.lab.pct.errors import AttachError
from dflashctl.lab.pct.output import write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn

CLEAR_ENV_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def environment(
    host: Mapping[bytes, bytes], configured: Sequence[bytes], *, keep: bool
) -> dict[bytes, bytes]:
    """What a command inside gets: the host's variables or only a PATH, `container=lxc`, and `configured`
    ("K=V" of the container's lxc.environment lines)."""
    env = dict(host) if keep else {b"PATH": CLEAR_ENV_PATH}
    env[b"container"] = b"lxc"
    for entry in configured:
        name, _, value = entry.partition(b"=")
        env[name] = value
    return env


def run(
    vmid: int,
    init_pid: int,
    argv: Sequence[bytes],
    env: Mapping[bytes, bytes],
    hold: Callable[[], None] | None = None,
) -> int:
    """Run argv inside, wait for it, return its exit code (128 + N after signal N; 1 if the container cannot
    be entered).

    `hold` is called in the new process before the command starts (a frozen container holds it there). The
    caller is changed for good (it has joined the namespaces) and should exit with the code.
    """
    folder = _working_folder()
    try:
        handles = namespaces.open_all(init_pid)
        namespaces.join_all(handles)
    except AttachError as error:
        _say(vmid, "get_attach_context: 406", str(error))
        _say(vmid, "lxc_attach: 1470", f"{str(error).partition(' - ')[0]} - Failed to get attach context")
        return 1
    try:
        child = os.fork()
    except OSError as error:  # the container's first process is gone: its pid namespace takes nobody in
        _say(vmid, "lxc_attach: 1590", f"{os.strerror(error.errno or 0)} - Failed to create attached process")
        return 1
    if child == 0:
        _inside(vmid, argv, env, folder, hold)
    # lxc-attach leaves these two to the command; TERM kills only lxc-attach, and the command runs on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


def _inside(
    vmid: int,
    argv: Sequence[bytes],
    env: Mapping[bytes, bytes],
    folder: str,
    hold: Callable[[], None] | None,
) -> NoReturn:
    code = 1
    try:
        namespaces.become_root()
        try:
            os.chdir(folder)
        except OSError:
            os.chdir("/")
        if hold is not None:
            hold()
        error = _execvp(argv, env)
        code = {errno.ENOENT: 127, errno.EACCES: 126, errno.ENOEXEC: 126}.get(error, 255)
        name = argv[0].decode("utf-8", "surrogateescape")
        _say(vmid, "lxc_attach_run_command: 1841", f'{os.strerror(error)} - Failed to exec "{name}"')
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def _execvp(argv: Sequence[bytes], env: Mapping[bytes, bytes]) -> int:
    """execvp(3) as the C library does it, with its PATH taken from env. Returns only on failure, with the
    errno."""
    name = argv[0]
    if b"/" in name:
        return _execve(name, argv, env)
    if not name:
        return errno.ENOENT
    if len(name) > 255:
        return errno.ENAMETOOLONG
    refused = False
    for folder in env.get(b"PATH", b"/bin:/usr/bin").split(b":"):
        number = _execve(folder + b"/" + name if folder else name, argv, env)
        if number == errno.EACCES:
            refused = True
        elif number not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT):
            return number
    return errno.EACCES if refused else errno.ENOENT


def _execve(path: bytes, argv: Sequence[bytes], env: Mapping[bytes, bytes]) -> int:
    try:
        os.execve(path, list(argv), dict(env))
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            return error.errno or errno.EIO
    try:  # no interpreter named: the C library gives it to the shell
        os.execve(b"/bin/sh", [b"/bin/sh", path, *argv[1:]], dict(env))
    except OSError as error:
        return error.errno or errno.EIO


def _say(vmid: int, where: str, text: str) -> None:
    line = f"lxc-attach: {vmid}: ../src/lxc/attach.c: {where} {text}\n"
    write(2, line.encode("utf-8", "surrogateescape"))
