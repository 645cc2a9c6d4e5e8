"""What the trainer needs of the interpreter that starts it, told in one message where it is not there.

Everything here runs on older Pythons, too, and beside no package: it is what tells of both.
"""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec

OLDEST = (3, 11)
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "yaml": "pyyaml",
    "rich": "rich",
    "typer": "typer",
}
"""Modules of the extra `trainer`, and the packages that bring them."""
EXIT_CODE = 2


def older_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> tuple[str, str] | None:
    """(what is wrong, what to do) of an interpreter that is too old; None of another."""
    if version[:2] >= OLDEST:
        return None
    found, least = ".".join(map(str, version[:3])), ".".join(map(str, OLDEST))
    return (
        f"{sys.executable} is Python {found}; the trainer needs {least} or newer",
        "start it by a newer one (with dflashctl: `python:` of the host in hosts.yaml)",
    )


def missing_package(error: BaseException) -> tuple[str, str] | None:
    """The same of an import that failed because a package is not installed; with it all others that are
    missing are named. None of any other error: a module that is missing from a package is a bug.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    name = error.name.partition(".")[0]
    if name == __name__.partition(".")[0] or _there(name):
        return None
    gone = missing_packages()
    if name not in PACKAGES:  # something that one of them needs
        gone.append(name)
    return _words(gone)


def missing_packages() -> list[str]:
    """Those of the extra `trainer` that this interpreter does not have, as pip names them."""
    return [package for module, package in PACKAGES.items() if not _there(module)]


def check_packages() -> None:
    """Raises ConfigError, naming every package that training needs and this interpreter does not have."""
    from trainer.errors import ConfigError

    gone = missing_packages()
    if gone:
        what, next = _words(gone)
        raise ConfigError(what, next=next)


def install(*packages: str) -> str:
    """The command that installs them for this interpreter. It names packages, not an extra of the project: in
    a container there is only the trainer's folder."""
    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(packages)}"


def _words(packages: list[str]) -> tuple[str, str]:
    hint = f"{install(*packages)}; or start it by a Python that has {'it' if len(packages) == 1 else 'them'}"
    return f"{sys.executable} has no {', '.join(packages)}", hint


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # half removed, or put into sys.modules by hand
        return module in sys.modules
