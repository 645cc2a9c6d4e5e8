"""What a root file system of the lab consists of, as a list of steps (plain data), and the code that does
them.

A plan is made once, on the laptop, without touching anything; it is stored as JSON and done by pid 1 of the
new namespaces. The root is entered first and filled afterwards, so that a link left behind inside cannot
lead a mount outside. Standard library only; works under `python -I -S`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dflashctl.lab import ns

OLD_ROOT = "/.old"

Op = Literal["dir", "bind", "tmpfs", "proc", "devpts", "link", "links"]


@dataclass(frozen=True)
class Step:
    """One thing to do. `target` is an absolute path in the new root, parents are made.

    dir    a folder with `mode`
    bind   `source` (absolute, in the root that is left) appears at target, with all mounts below it
    tmpfs  an empty file system in memory, root folder with `mode`
    proc, devpts  these file systems, new
    link   a symbolic link whose text is `source`
    links  a symbolic link in the folder target for every entry of the folder `source` (in the new root)
    `optional`: a source that does not exist is no error.
    """

    op: Op
    target: str
    source: str = ""
    read_only: bool = False
    mode: int = 0o755
    optional: bool = False


def to_json(steps: Iterable[Step]) -> list[dict[str, Any]]:
    return [asdict(step) for step in steps]


def from_json(rows: Iterable[dict[str, Any]]) -> list[Step]:
    return [Step(**row) for row in rows]


def build(root: str, steps: list[Step]) -> None:
    """Enter `root` (a folder) as the file system's root and do the steps. To be called by pid 1 of new
    mount and pid namespaces. Raises ns.StageError."""
    sources = {step.source: os.path.realpath(step.source) for step in steps if step.op == "bind"}
    try:
        os.makedirs(root + OLD_ROOT, exist_ok=True)
        ns.bind(root, root)
    except OSError as error:
        raise ns.StageError("mount", error, root) from None
    try:
        ns.pivot(root, OLD_ROOT)
    except OSError as error:
        raise ns.StageError("pivot", error) from None
    for step in steps:
        try:
            _do(step, sources)
        except FileNotFoundError as error:
            if not (step.optional and step.op == "bind"):
                raise ns.StageError("mount", error, f"{step.op} {step.target}") from None
        except OSError as error:
            stage = "proc" if step.op == "proc" else "mount"
            raise ns.StageError(stage, error, f"{step.op} {step.target}") from None
    try:
        ns.detach(OLD_ROOT)
        os.rmdir(OLD_ROOT)
    except OSError as error:
        raise ns.StageError("pivot", error, "leaving the old root") from None


def _do(step: Step, sources: dict[str, str]) -> None:
    if step.op == "dir":
        _make_folder(step.target)
        os.chmod(step.target, step.mode)
    elif step.op == "bind":
        _bind(OLD_ROOT + sources[step.source], step.target, step.read_only)
    elif step.op == "tmpfs":
        _make_folder(step.target)
        ns.mount("tmpfs", step.target, "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, f"mode={step.mode:o}")
    elif step.op == "proc":
        _make_folder(step.target)
        ns.mount("proc", step.target, "proc", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)
    elif step.op == "devpts":
        _make_folder(step.target)
        ns.mount(
            "devpts",
            step.target,
            "devpts",
            ns.MS_NOSUID | ns.MS_NOEXEC,
            "newinstance,ptmxmode=0666,mode=0620",
        )
    elif step.op == "link":
        _link(step.source, step.target)
    elif step.op == "links":
        for name in os.listdir(step.source):
            _link(f"{step.source}/{name}", f"{step.target}/{name}")


def _bind(source: str, target: str, read_only: bool) -> None:
    _drop_link(target)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(source):
        raise FileNotFoundError(2, "No such file or directory", source.removeprefix(OLD_ROOT))
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    ns.bind(source, target, read_only=read_only)


def _make_folder(path: str) -> None:
    _drop_link(path)
    os.makedirs(path, exist_ok=True)


def _drop_link(path: str) -> None:
    """A link that a program inside has put in a folder's place goes; one of the machine's own stays."""
    if os.path.islink(path):
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise


def _link(text: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(target):
        os.unlink(target)
    os.symlink(text, target)
