"""Through the folders of a deploy: what is there, and what of it git ignores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pathspec

from dflashctl.agent.releases.release import parents
from dflashctl.config.recipe import Deploy
from dflashctl.errors import UsageError, VerificationFailed
from dflashctl.releases.gitfacts import GitFacts
from dflashctl.releases.globs import may_match_below

NEVER = ("__pycache__", ".git", ".hg", ".svn")

LITTER = re.compile(
    r"\.DS_Store|\._.+|Thumbs\.db|desktop\.ini|\.\#.+|\#.+\#|\..+\.sw[a-p]|.+~|\.nfs[0-9a-f]{16,}|\.fuse_hidden.+"
)
"""Files that desktops, editors and file systems put beside one's own, unasked. Emacs's lock is a link to
nowhere, macOS's `._x.py` is no Python, and a swap file is what was typed and not saved."""


def changed_while_read(path: str) -> VerificationFailed:
    return VerificationFailed(
        f"{path} changed while it was being read; nothing was sent", next="let it settle, then deploy again"
    )


class Walk:
    """Iterates over (path, ignored by git) of files, links and empty folders that a pattern may mean. An
    ignored folder comes as one path, unless it holds something that travels all the same. Raises UsageError
    for a folder that cannot be read.

    What is ignored git itself says. The .gitignore files are read here where it does not: without it, outside
    a repository, and in a repository within, which has rules of its own."""

    def __init__(self, deploy: Deploy, root: Path, git: GitFacts | None) -> None:
        self._include = deploy.include
        self._root = root
        self._tracked = git.tracked if git else frozenset()
        self._said = git.ignored if git else None
        self._wanted = {pattern.removeprefix("./") for pattern in deploy.include} | self._tracked
        self._open_anyway = {parent for path in self._wanted for parent in parents(path)}

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        everything = self._said is not None and "" in self._said  # the root itself is ignored
        yield from self._folder(self._root, "", _ignores_above(self._root), everything, self._said)

    def _folder(
        self, folder: Path, prefix: str, ignores: Ignores, inherited: bool, said: frozenset[str] | None
    ) -> Iterator[tuple[str, bool]]:
        entries = [each for each in self._entries(folder, prefix) if not self._is_litter(each, prefix)]
        if prefix and any(entry.name == ".git" for entry in entries):
            ignores, said = [], None
        ignores = ignores + _ignore_file(folder)
        if not entries and prefix:
            yield prefix.rstrip("/"), inherited
        for entry in entries:
            path = prefix + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name in NEVER or (entry.name.endswith((".pyc", ".pyo")) and not is_folder):
                continue
            ignored = inherited or (said is not None and path in said)
            if not ignored and (said is None or is_folder):
                ignored = _ignored(ignores, entry.path + "/" * is_folder)
                # Where git speaks, it does so of all but empty folders.
                ignored = ignored and (said is None or not self._entries(Path(entry.path), path))
            if not is_folder:
                yield path, ignored and path not in self._tracked
            elif ignored and path not in self._open_anyway:
                yield path, True
            elif may_match_below(path, self._include):
                yield from self._folder(Path(entry.path), path + "/", ignores, ignored, said)

    def _is_litter(self, entry: os.DirEntry[str], prefix: str) -> bool:
        if not LITTER.fullmatch(entry.name) or prefix + entry.name in self._wanted:
            return False
        return not entry.is_dir(follow_symlinks=False)

    @staticmethod
    def _entries(folder: Path, shown: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as found:
                return sorted(found, key=lambda entry: entry.name)
        except FileNotFoundError as error:
            raise changed_while_read(shown) from error
        except OSError as error:
            what = f"{shown or folder} cannot be read: {error.strerror}"
            raise UsageError(what, next="exclude it, or mend it") from error


Ignores = list[tuple[str, pathspec.GitIgnoreSpec]]
"""(folder that the patterns are relative to, as an absolute path with a trailing slash, patterns)."""


def _ignores_above(root: Path) -> Ignores:
    """.gitignore files from the top of the repository down to root's parent; none outside a repository."""
    top = next((up for up in (root, *root.parents) if (up / ".git").exists()), root)
    between = [up for up in reversed(root.parents) if up == top or top in up.parents]
    return [found for up in between for found in _ignore_file(up)]


def _ignore_file(folder: Path) -> Ignores:
    try:
        text = (folder / ".gitignore").read_bytes().decode("utf-8-sig", "replace")
    except OSError:
        return []
    lines = [
        line.removesuffix("\r") for line in text.split("\n")
    ]  # not splitlines: git ends lines here alone
    return [(f"{folder}/", pathspec.GitIgnoreSpec.from_lines(lines))]


def _ignored(ignores: Ignores, absolute: str) -> bool:
    """git's rule: the deepest .gitignore that has a word on the path decides."""
    for base, spec in reversed(ignores):
        verdict = spec.check_file(absolute.removeprefix(base)).include
        if verdict is not None:
            return verdict
    return False
