"""The environment variables that torch and triton read, and those that are set for nobody."""

from __future__ import annotations

import importlib.util
import mmap
import os
from pathlib import Path
from typing import Any

from .env_reads import WORTH_PARSING, Source

PREFIXES = ("TORCH", "PYTORCH", "TRITON")
"""What is set under these names and is read by nobody is most likely a mistake."""

PACKAGES = ("torch", "triton")
FILES_SHOWN = 3


def package_folders() -> list[Path]:
    """Where torch and triton lie; found without importing them."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    return [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]


def variables_read(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """{variable: {"options": [], "files": [at most FILES_SHOWN]}} of all Python files below."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            data = path.read_bytes()
            if not WORTH_PARSING.search(data):
                continue
            try:
                names = Source(data.decode("utf-8", "replace")).names()
            except (SyntaxError, ValueError):
                continue  # a template of a file
            for name in names:
                files = found.setdefault(name, {"options": [], "files": []})["files"]
                if len(files) < FILES_SHOWN:
                    files.append(path.relative_to(folder.parent).as_posix())
    return found


def set_variables(environ: dict[str, str], reads: dict[str, Any]) -> list[dict[str, Any]]:
    """What is set of all that is read, or could be meant to be: {"name", "value", "known": read | named |
    unread, "named_in": [files]}. `named`: not found as a read, but the name stands in a source or library."""
    candidates = [name for name in sorted(environ) if name.startswith(PREFIXES)]
    suspects = [name for name in candidates if name not in reads]
    named = named_in(package_folders(), suspects) if suspects else {}
    return [
        {
            "name": name,
            "value": environ[name],
            "known": "read" if name in reads else "named" if named[name] else "unread",
            "named_in": named.get(name, []),
        }
        for name in candidates
    ]


def named_in(folders: list[Path], names: list[str]) -> dict[str, list[str]]:
    """{name: files that hold it as a whole text}: quoted in a source, between zero bytes in a library."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for folder in folders:
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.so*")]):
            marks = [("\0", "\0")] if path.suffix != ".py" else [('"', '"'), ("'", "'")]
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    continue
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    for name, files in found.items():
                        if len(files) < FILES_SHOWN and any(
                            data.find(f"{before}{name}{after}".encode()) >= 0 for before, after in marks
                        ):
                            files.append(path.relative_to(folder.parent).as_posix())
    return found
