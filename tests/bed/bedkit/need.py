"""Whether this machine can carry the bed, and how to get there if not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("lxc", "mmdebstrap", "openssh-server", "openssh-client", "procps", "util-linux")
HOW = "as root on Linux: apt-get install -y --no-install-recommends " + " ".join(PACKAGES)

_PROGRAMS = {
    "lxc-start": "lxc",
    "lxc-attach": "lxc",
    "lxc-freeze": "lxc",
    "mmdebstrap": "mmdebstrap",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
SSHD = Path("/usr/sbin/sshd")


def reason_against() -> str | None:
    """None when the bed can be tried; else why not, in one line. Looks, starts one process, changes
    nothing."""
    if sys.platform != "linux":
        return f"the bed needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "the bed needs root (real LXC containers)"
    missing = sorted({package for name, package in _PROGRAMS.items() if shutil.which(name) is None})
    if not SSHD.exists():
        missing.append("openssh-server")
    if missing:
        return "missing packages: " + " ".join(missing)
    trial = ["unshare", "--mount", "--pid", "--uts", "--fork", "--propagation", "private", "true"]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        return f"this machine refuses namespaces to root: {done.stderr.strip()}"
    return None
