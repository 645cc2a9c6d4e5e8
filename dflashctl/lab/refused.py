"""Why a machine refuses the lab, and what helps. Pure but for `facts`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.errors import DflashError, Unreachable, UsageError

NEVER = "nothing of the lab ever runs outside namespaces"
ELSEWHERE = "use a Linux virtual machine, or another machine"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MOVE = "make room, or set DFLASHCTL_LAB_DIR to a folder on another disk"


@dataclass(frozen=True)
class Facts:
    """What the kernel says of user namespaces; None where it does not know the setting."""

    apparmor_restricts: int | None
    userns_clone: int | None
    max_user_namespaces: int | None
    in_container: bool


def facts() -> Facts:
    return Facts(
        apparmor_restricts=_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        userns_clone=_number("/proc/sys/kernel/unprivileged_userns_clone"),
        max_user_namespaces=_number("/proc/sys/user/max_user_namespaces"),
        in_container=any(Path(p).exists() for p in ("/.dockerenv", "/run/.containerenv"))
        or "container" in os.environ,
    )


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def check_platform(platform: str = sys.platform) -> None:
    """Raises UsageError anywhere but on Linux."""
    if platform != "linux":
        name = "macOS" if platform == "darwin" else platform
        raise UsageError(
            f"the lab needs Linux: {name} has no namespaces, and {NEVER}",
            where="lab up",
            next="run dflashctl in a Linux virtual machine, or name a real host with -H",
        )


def explain(told: Mapping[str, Any], log: Path, known: Facts | None = None) -> DflashError:
    """The error for what the host said (host.refusal) before it went."""
    if "error" not in told:
        return Unreachable("the lab's host ended at once", where=str(log), next="read that log")
    stage, number = str(told["stage"]), int(told["errno"] or 0)
    if stage != "unshare" and number in NO_ROOM:
        return UsageError(f"no room for the lab's files ({told['error']})", where=str(log.parent), next=MOVE)
    reason = advice(stage, number, known or facts())
    if reason is None:
        return Unreachable(f"the lab cannot start: {told['error']}", where=str(log), next="read that log")
    why, helps = reason
    return UsageError(f"{why} ({told['error']}); {NEVER}", where="lab up", next=helps)


def advice(stage: str, number: int, known: Facts) -> tuple[str, str] | None:
    """(why, what helps) for a refused step, or None when it is not a refusal of namespaces."""
    if stage not in ("unshare", "map", "mount", "proc", "pivot"):
        return None
    if stage in ("mount", "pivot") and number not in (errno.EPERM, errno.EACCES):
        return None
    if known.max_user_namespaces == 0 or (stage == "unshare" and number in (errno.ENOSPC, errno.EUSERS)):
        return (
            f"this machine allows no{'' if known.max_user_namespaces == 0 else ' more'} user namespaces",
            "sudo sysctl -w user.max_user_namespaces=15000",
        )
    if known.userns_clone == 0:
        return (
            "this machine keeps user namespaces for root",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        )
    if known.apparmor_restricts:
        return (
            "AppArmor takes away what a user namespace is for (the default since Ubuntu 24.04)",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (until the next boot; for good, "
            "put that setting into /etc/sysctl.d/60-userns.conf), or run as root",
        )
    if known.in_container:
        return (
            "this container may not make namespaces",
            "start it with --security-opt seccomp=unconfined --security-opt systempaths=unconfined "
            "--cap-add SYS_ADMIN, or use a virtual machine",
        )
    if stage == "unshare" and number == errno.EINVAL:
        return "this kernel has no user namespaces (CONFIG_USER_NS)", ELSEWHERE
    if stage == "unshare" and number == errno.EPERM:
        return "this machine refuses user namespaces (a security module, seccomp or a chroot)", ELSEWHERE
    return f"this machine refuses what a namespace is for (step {stage})", ELSEWHERE
