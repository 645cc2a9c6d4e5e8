"""Why a program did not start, in words: what exec answers names the wrong file, or nothing."""

from __future__ import annotations

import errno
import os
import stat
from typing import Dict, Optional, Sequence

HEAD_BYTES = 256
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def cannot_start(command: Sequence[str], cwd: str, env: Dict[str, str], error: Exception) -> str:
    """`error` is what starting `command` in `cwd` raised."""
    return "cannot start %s: %s" % (command[0], _why(str(command[0]), cwd, env, error))


def _why(program: str, cwd: str, env: Dict[str, str], error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EAGAIN:
        return "no more processes are allowed there (pids.max of the container, or ulimit -u)"
    if number not in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
        return str(error)
    path = _found(program, cwd, env)
    if path is None:
        return _missing(program, cwd, env)
    it = "it" if "/" in program else path
    try:
        mode = os.stat(path).st_mode
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except IsADirectoryError:
        return "%s is a folder" % it
    except OSError as trouble:
        return "%s cannot be read: %s" % (it, trouble.strerror)
    if number == errno.EACCES:
        if not mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH):
            return "%s is not executable: chmod +x, or name its interpreter first" % it
        if os.statvfs(path).f_flag & os.ST_NOEXEC:
            return "%s lies on a file system that is mounted noexec: name its interpreter first" % it
        return str(error)
    if head.startswith(b"#!"):
        return _interpreter(it, head)
    if number == errno.ENOEXEC:
        return "%s is no program for this machine; a script needs a first line such as #!/bin/sh" % it
    return "%s is there, but not the loader that it names (built for another system?)" % it


def _found(program: str, cwd: str, env: Dict[str, str]) -> Optional[str]:
    """The file that is meant, as exec looks for it."""
    if "/" in program:
        path = os.path.join(cwd, program)
        return path if os.path.lexists(path) else None
    for folder in env.get("PATH", DEFAULT_PATH).split(":"):
        path = os.path.join(cwd, folder, program)
        if os.path.isfile(path):
            return path
    return None


def _missing(program: str, cwd: str, env: Dict[str, str]) -> str:
    if "/" in program:
        below = "" if program.startswith("/") else " below %s" % cwd
        return "there is no such file%s" % below
    if os.path.isfile(os.path.join(cwd, program)):
        return "it is not on the PATH (%s), but in %s: write ./%s" % (env.get("PATH", ""), cwd, program)
    return "there is no program of this name on the PATH (%s)" % env.get("PATH", DEFAULT_PATH)


def _interpreter(it: str, head: bytes) -> str:
    line = head[2:].split(b"\n", 1)[0]
    if line.endswith(b"\r"):
        return "%s has line ends of Windows (its first line ends in \\r): save it with those of Unix" % it
    words = line.split()
    name = words[0].decode("utf-8", "replace") if words else ""
    return "%s asks for the interpreter %s, which is not there" % (it, name or "''")
