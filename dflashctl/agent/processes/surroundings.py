"""What is wrong around a program when a call of the system fails and no bug is behind it."""

from __future__ import annotations

import errno
import os
from typing import Optional

from .. import AgentError

HINTS = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EROFS: "that file system is read-only",
    errno.EACCES: "look at its owner: an unprivileged container may not touch what an unmapped uid owns",
    errno.EPERM: "look at its owner: it is another user's",
    errno.EIO: "the disk or its mount is failing: look at dmesg on the host",
    errno.ESTALE: "its network file system went away and came back: mount it anew",
    errno.ENOTCONN: "what serves its mount has gone: mount it anew",
    errno.EMFILE: "raise `ulimit -n` there",
    errno.ENFILE: "that machine has too many open files",
    errno.EAGAIN: "no more processes are allowed there: pids.max of the container, or ulimit -u",
    errno.ENOMEM: "that machine, or its container, is out of memory",
}


def told(error: OSError) -> Optional[AgentError]:
    """The error that a person can do something about; None for one that points at a bug."""
    if error.errno not in HINTS:
        return None
    return AgentError("verification", os.strerror(error.errno), str(error.filename or ""), HINTS[error.errno])
