"""The first process of the bed's host: a pid, mount and host name namespace of its own around the real sshd,
the GPU driver, and all LXC containers. When it ends, for whatever reason, the kernel ends everything in it.

    unshare --mount --pid --uts --fork --kill-child ... python -I hostinit.py PLAN.json

It does the plan's mounts, starts the plan's servers, prints `ready`, reaps orphans, and ends when its stdin
closes: that is when the test process that holds the other end is gone. Standard library only."""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 32, 4096, 16384
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2). OSError names the target."""
    args = [text.encode() for text in (source, target, kind)]
    if _LIBC.mount(*args, ctypes.c_ulong(flags), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target} ({kind} {options}): {os.strerror(number)}")


def make_folders(path: Path, uid: int) -> None:
    """The folder and its missing parents, each owned by uid."""
    if not path.exists():
        make_folders(path.parent, uid)
        path.mkdir(mode=0o755)
        os.chown(path, uid, uid)


def do(step: dict[str, Any]) -> None:
    """One step of the plan; `to` and `from` are absolute paths."""
    op, to = step["op"], step["to"]
    uid = step.get("uid", 0)
    if op == "mkdir":
        make_folders(Path(to), uid)
        os.chmod(to, step.get("mode", 0o755))  # noqa: PTH101
    elif op == "tmpfs":
        mount("tmpfs", to, "tmpfs", MS_NOSUID, step.get("options", "mode=755"))
    elif op == "overlay":
        mount("overlay", to, "overlay", 0, step["options"])
    elif op == "symlink":
        os.symlink(step["from"], to)  # noqa: PTH211
    elif op == "bind":
        target = Path(to)
        if Path(step["from"]).is_dir():
            make_folders(target, uid)
        elif not target.exists():
            make_folders(target.parent, uid)
            target.touch()
        mount(step["from"], to, "none", MS_BIND | MS_REC)
        if step.get("ro"):
            mount("none", to, "none", MS_BIND | MS_REMOUNT | MS_RDONLY)
    else:
        raise ValueError(f"no step {op!r}")


def reap() -> None:
    """Collect what has ended, orphans of the whole bed included."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    for step in plan["steps"]:
        do(step)
    with open(plan["hostname_file"], "w") as f:
        f.write(plan["hostname"])
    for server in plan["servers"]:
        log = os.open(server["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        subprocess.Popen(
            server["argv"],
            env=server["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        os.close(log)
    print("ready", flush=True)
    while True:
        if select.select([0], [], [], 0.2)[0] and not os.read(0, 4096):
            return 0
        reap()


if __name__ == "__main__":
    sys.exit(main())
