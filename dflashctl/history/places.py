"""Where a file from over there may stand here: below the folder, through no link, over nothing but a file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

PART = ".dflash-part"
LONGEST_NAME_BYTES = 255


def problem_of(path: str) -> str | None:
    """Why a name from over there must not become a path here; None for a good one."""
    if not path or "\0" in path:
        return "not a name"
    if path.startswith("/") or path.startswith("~") or "\\" in path or ":" in path.split("/")[0][:2]:
        return "not a path below the folder"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "leads out of the folder"
    if path.endswith(PART):
        return f"{PART} is what parts of files are called here"
    return None


def place_of(folder: Path, path: str) -> Path | str:
    """Where a file goes, or why it may not: also a link that somebody made here must not lead out."""
    problem = problem_of(path)
    if problem is not None:
        return problem
    target = folder / path
    inside = folder.resolve()
    if not (target.parent.resolve() == inside or inside in target.parent.resolve().parents):
        return "a link here leads out of the folder"
    if target.is_symlink():
        return "a link of this name is here already"
    if target.is_dir():
        return "a folder of this name is here already"
    if target.exists() and not target.is_file():
        return "something of this name is here that is no file"  # a pipe would be waited for
    return target


def part_of(place: Path) -> Path:
    """What a file is called while it comes. Beside a name that is too long for more it has another."""
    if len(os.fsencode(place.name + PART)) <= LONGEST_NAME_BYTES:
        return place.with_name(place.name + PART)
    return place.with_name(hashlib.sha256(os.fsencode(place.name)).hexdigest() + PART)


def problem_of_part(part: Path) -> str | None:
    """Why a part must not be written."""
    if not part.is_symlink() and (part.is_file() or not part.exists()):
        return None
    kind = "a link" if part.is_symlink() else "a folder" if part.is_dir() else "no file"
    return f"{kind} stands where its part would go: {part.name}"
