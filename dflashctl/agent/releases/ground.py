"""The folder that a deploy writes into: is it there, may we write, and what does a failed write mean."""

from __future__ import annotations

import errno
import os
import stat

from .. import AgentError

NOBODY = 65534
"""How an unprivileged container sees every uid of the host that its map leaves out."""


def ready(folder: str, create: bool) -> str:
    """The folder, made if `create`, else its nearest existing parent. Changes nothing else.

    Raises AgentError("verification") when nothing could be written there.
    """
    if create:
        mask = os.umask(0o022)
        try:
            os.makedirs(folder, 0o755, exist_ok=True)
        except OSError as error:
            raise explain(error, existing(folder)) from error
        finally:
            os.umask(mask)
    found = existing(folder)
    if not os.access(found, os.W_OK | os.X_OK):
        read_only = os.statvfs(found).f_flag & os.ST_RDONLY
        raise explain(OSError(errno.EROFS if read_only else errno.EACCES, ""), found)
    return found


def existing(path: str) -> str:
    """The folder, or its nearest parent that is there."""
    while not os.path.isdir(path):
        if os.path.lexists(path) and not os.path.islink(path):
            raise AgentError("verification", "is a file, but a folder is needed here", path)
        path = os.path.dirname(path) or "/"
    return path


def explain(error: OSError, folder: str) -> AgentError:
    """What a failed write means, in the words of someone who knows containers."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    named = " (%s)" % error.filename if error.filename else ""
    what = "%s%s; nothing switched" % (reason, named)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return AgentError("verification", what, folder, "free some space there, then deploy again")
    if error.errno == errno.EROFS:
        return AgentError("verification", what, folder, "mount it writable, or choose another code_root")
    if error.errno in (errno.EACCES, errno.EPERM):
        return AgentError("verification", what, folder, _permission_hint(folder))
    return AgentError("verification", what, folder)


def _permission_hint(folder: str) -> str:
    found = os.stat(folder)
    owner = found.st_uid
    if owner == NOBODY:
        return (
            "it belongs to a user of the host that this unprivileged container cannot see (shown as nobody):"
            " on the host, chown the folder behind it to 100000:100000, or to what lxc.idmap maps to uid 0"
        )
    if owner == os.geteuid():
        mode = stat.S_IMODE(found.st_mode)
        return "it is ours, with mode %04o: chmod u+rwx it, or choose another code_root" % mode
    return "it belongs to uid %d and this is uid %d: chown it, or choose another code_root" % (
        owner,
        os.geteuid(),
    )
