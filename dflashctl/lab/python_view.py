"""Which folders make up the machine's Python, so that the lab can show them read-only at their own paths and
nothing else of a person's home."""

from __future__ import annotations

import os
import pwd
import site
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

COVERED = ("/usr", "/etc", "/nix", "/gnu")
"""Parts of the machine that the lab shows anyway (the last two where they exist: there, programs live in
them)."""

PACKAGE_FOLDERS = ("site-packages", "dist-packages")
"""Folders of installed packages, wherever sys.path has them from (a .pth file, PYTHONPATH, --user)."""

HOMES = ("/root", "/home/ct", "/srv/home", "/opt/home")


@dataclass(frozen=True)
class PythonFacts:
    """The running interpreter: how it was called, and the folders (as spelled) that it needs."""

    executable: str
    interpreter: str  # the program itself, links followed: the one that has a standard library beside it
    prefixes: tuple[str, ...]
    user_base: str | None = None  # of `pip install --user`, when this interpreter uses it
    search: tuple[str, ...] = ()  # folders of packages that only PYTHONPATH names


def gather() -> PythonFacts:
    """The facts of the interpreter that runs this."""
    executable = os.path.abspath(sys.executable)
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    # `venv/bin/python` may be a link to a link to the program; each link's own folder must be there.
    prefixes += [str(PurePosixPath(hop).parent.parent) for hop in link_hops(executable)[1:]]
    packages = [
        path for path in sys.path if PurePosixPath(path).name in PACKAGE_FOLDERS and os.path.isdir(path)
    ]
    user_site = site.getusersitepackages()
    return PythonFacts(
        executable,
        os.path.realpath(executable),
        (*prefixes, *packages),
        user_base=site.getuserbase() if site.ENABLE_USER_SITE and user_site in packages else None,
        search=tuple(p for p in os.environ.get("PYTHONPATH", "").split(":") if p in packages),
    )


def link_hops(path: str) -> list[str]:
    """path, and what each symbolic link (of the last component) leads to, up to the file itself."""
    hops = [path]
    while os.path.islink(hops[-1]) and len(hops) < 40:
        hops.append(os.path.normpath(os.path.join(os.path.dirname(hops[-1]), os.readlink(hops[-1]))))
    return hops


def folders_to_show(facts: PythonFacts, person_home: str | None = None) -> list[str]:
    """The folders to bind, parents before children, each at the path where it is spelled and at its real
    one."""
    home = person_home or pwd.getpwuid(os.geteuid()).pw_dir
    wanted: list[str] = []
    for prefix in facts.prefixes:
        for path in narrowed(prefix, home):
            wanted += [os.path.normpath(path), os.path.realpath(path)]
    return outermost(path for path in wanted if os.path.exists(path))


def narrowed(prefix: str, person_home: str) -> list[str]:
    """A prefix, or, when a person's home lies in it or is it, only its parts that hold Python."""
    if not is_below(person_home, prefix):
        return [prefix]
    return [f"{prefix.rstrip('/')}/{part}" for part in ("bin", "lib", "lib64", "pyvenv.cfg")]


def outermost(paths: Iterable[str]) -> list[str]:
    """Without the paths that another one (or a covered part of the machine) contains; sorted."""
    kept: list[str] = []
    for path in sorted(set(paths), key=lambda p: (p.count("/"), p)):
        if not any(is_below(path, outer) for outer in (*COVERED, *kept)):
            kept.append(path)
    return kept


def is_below(path: str, folder: str) -> bool:
    """Whether path is folder or lies in it (by spelling; both absolute)."""
    return PurePosixPath(path).is_relative_to(folder)


def container_home(prefixes: Sequence[str]) -> str:
    """root's home inside: the first place that does not touch a folder of the machine's Python.

    >>> container_home(["/root/python3.12", "/opt/venv"])
    '/home/ct'
    """
    for home in HOMES:
        if not any(is_below(prefix, home) or is_below(home, prefix) for prefix in prefixes):
            return home
    raise ValueError(f"every one of {', '.join(HOMES)} touches a folder of Python: {', '.join(prefixes)}")
