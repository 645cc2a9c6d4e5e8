"""The file that a run's program writes to, wherever logrotate and people have put it."""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, Optional

from ..processes import proc
from ..records.runfolder import RunFolder


def log_file(run: RunFolder, record: Dict[str, Any]) -> str:
    """Where this run's log is read. Usually run.log_path(); but a file there that is empty, or none, is not
    the log while the program writes to another one: it was renamed, or removed, under its open descriptor
    (then: a path below /proc)."""
    path = run.log_path(record)
    try:
        if os.stat(path).st_size > 0:
            return path
    except OSError:
        pass
    return _open_log(run) or path


def _open_log(run: RunFolder) -> Optional[str]:
    """The log as the living program has it open, if it is the file that the supervisor gave it."""
    recorded = run.supervisor().value or {}
    leader = proc.as_identity(recorded.get("leader"))
    if not proc.same_place(recorded) or leader is None or proc.living(leader) is None:
        return None
    for descriptor in (1, 2):
        link = "/proc/%d/fd/%d" % (leader[0], descriptor)
        try:
            status, name = os.stat(link), os.readlink(link)
            if status.st_ino != recorded.get("log_inode") or not stat.S_ISREG(status.st_mode):
                continue
        except OSError:
            continue
        try:
            there = os.stat(name)
            return name if (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino) else link
        except OSError:
            return link
    return None


def is_open_log(run: RunFolder, inode: int) -> bool:
    """Does the living program write to this very file?"""
    path = _open_log(run)
    try:
        return path is not None and os.stat(path).st_ino == inode
    except OSError:
        return False
