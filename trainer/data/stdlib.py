"""The demo's real text: Python sources of the running interpreter's own standard library.

One home of the rule that says which files are used and which are held out. The target's pretraining and the
drafter's training both import it, so a held-out file is unseen by both. The rule depends on the relative path
alone, so a file keeps its side when the Python version changes.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_ONE_IN = 25
# Tests repeat themselves; encodings and pydoc_data are tables; lib2to3 and idlelib are gone or absent in some
# builds; site-packages is not the standard library at all.
EXCLUDED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "encodings",
        "idlelib",
        "pydoc_data",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
)


def root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_used(relative: str) -> bool:
    """Whether the file at this posix path below the library's root belongs to the data at all."""
    parts = relative.split("/")
    # _sysconfigdata_*.py holds one machine's build settings: not text anybody wrote.
    return not EXCLUDED_FOLDERS.intersection(parts[:-1]) and not parts[-1].startswith("_sysconfigdata")


def is_held_out(relative: str) -> bool:
    """Whether the file at this posix path below the library's root is kept for evaluation."""
    return zlib.crc32(relative.encode()) % HELD_OUT_ONE_IN == 0


def files(held_out: bool, base: Path | None = None) -> list[Path]:
    """Absolute paths of the training files or of the held-out files, sorted by relative path."""
    base = root() if base is None else base
    return [base / name for name in sorted(_used(base)) if is_held_out(name) is held_out]


def _used(base: Path) -> Iterator[str]:
    """Posix paths below `base` of what belongs to the data. Excluded folders are not entered: site-packages
    may hold a hundred times as many files as the library.
    """
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        below = Path(folder).relative_to(base)
        yield from filter(is_used, ((below / name).as_posix() for name in names if name.endswith(".py")))


def read(path: Path) -> str:
    """Text of one source file; bytes that are not UTF-8 become U+FFFD, never an error."""
    return path.read_text(encoding="utf-8", errors="replace")
