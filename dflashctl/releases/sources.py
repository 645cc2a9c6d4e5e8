"""A recipe's files as one consistent snapshot: what would travel, with the hash of every content."""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from dataclasses import dataclass, field
from pathlib import Path

from dflashctl.agent.releases.release import (
    FILE,
    FOLDER,
    LINK,
    MANIFEST,
    PROGRAM,
    parents,
    release_hash,
    sha256_of_text,
)
from dflashctl.config.recipe import Deploy
from dflashctl.errors import UsageError, VerificationFailed
from dflashctl.releases.gitfacts import GitFacts, read_git, why_silent
from dflashctl.releases.globs import matches, names_literally, secret_reason, unfit_name
from dflashctl.releases.walk import Walk, changed_while_read

KEEP_FILE_BYTES = 1 << 20
KEEP_ALL_BYTES = 64 << 20
"""Contents up to these sizes stay in memory; a larger one is read and hashed once more when it is packed."""

ATTEMPTS = 3


@dataclass(frozen=True)
class SourceFile:
    """One entry of the manifest and where its content is. `link` is set for a symbolic link."""

    path: str
    sha256: str
    mode: str
    size: int
    link: str | None = None
    content: bytes | None = field(default=None, repr=False, compare=False)

    def entry(self) -> dict[str, object]:
        """Its row in the manifest (dflashctl/agent/releases/release.py)."""
        row: dict[str, object] = {
            "path": self.path,
            "sha256": self.sha256,
            "mode": self.mode,
            "size": self.size,
        }
        return row | ({"link": self.link} if self.link is not None else {})


@dataclass(frozen=True)
class Snapshot:
    """All files of a deploy as they were at one moment."""

    root: Path
    files: tuple[SourceFile, ...]
    git: GitFacts | None
    git_problem: str = ""
    """Why git told nothing, though there is a repository."""

    @property
    def release(self) -> str:
        return release_hash(self.manifest())

    def manifest(self) -> list[dict[str, object]]:
        return [file.entry() for file in self.files]

    def python_files(self) -> list[SourceFile]:
        return [file for file in self.files if file.path.endswith(".py") and file.mode in (FILE, PROGRAM)]

    def read(self, file: SourceFile) -> bytes:
        """The content of one (small) file, proven to be what was hashed."""
        if file.content is not None:
            return file.content
        data = (self.root / file.path).read_bytes()
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise changed_while_read(file.path)
        return data


def take_snapshot(deploy: Deploy, project_root: Path) -> Snapshot:
    """Read the files of a recipe once.

    Raises UsageError (a pattern without files, a name or link that cannot travel, a file that looks like a
    secret), VerificationFailed when files keep changing while they are read.
    """
    root = (project_root / deploy.root).resolve()
    if not root.is_dir():
        raise UsageError(f"no such folder: {root}", where="deploy.root")
    git = read_git(root)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            silent = why_silent(root) if git is None else ""
            return Snapshot(root, _read_all(deploy, root, git), git, silent)
        except VerificationFailed:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def _read_all(deploy: Deploy, root: Path, git: GitFacts | None) -> tuple[SourceFile, ...]:
    chosen = select(deploy, root, git)
    files: list[SourceFile] = []
    stamps: dict[str, tuple[int, ...]] = {}
    kept = 0
    for path in chosen:
        file, stamp = _read_one(root, path, keep=kept < KEEP_ALL_BYTES)
        kept += len(file.content or b"")
        files.append(file)
        stamps[path] = stamp
    for path in chosen:  # the set must be of one moment, not only each file of its own
        if _stamp(root / path) != stamps[path]:
            raise changed_while_read(path)
    _check_script(deploy, files)
    _check_secrets(deploy, root, files)
    _check_links(files)
    return tuple(files)


def select(deploy: Deploy, root: Path, git: GitFacts | None = None) -> list[str]:
    """Paths (with `/`) that travel, sorted: included, not excluded, and not ignored by git, unless git tracks
    them or the recipe names them in full."""
    chosen: list[str] = []
    unused = set(deploy.include)
    ignored: dict[str, str] = {}
    for path, skipped in Walk(deploy, root, git):
        hits = [pattern for pattern in deploy.include if matches(path, [pattern])]
        if not hits or matches(path, deploy.exclude):
            continue
        if skipped and not names_literally(path, deploy.include):
            ignored.update(dict.fromkeys(hits, path))
            continue
        problem = unfit_name(path)
        if problem or path == MANIFEST:
            reason = problem or "dflashctl keeps its manifest under this name"
            raise UsageError(f"{path!a} cannot travel: {reason}", next="rename it, or exclude it")
        chosen.append(path)
        unused.difference_update(hits)
    if unused:
        pattern = next(each for each in deploy.include if each in unused)
        why = f" that git does not ignore (such as {ignored[pattern]})" if pattern in ignored else ""
        raise UsageError(
            f"deploy.include: {pattern!r} matches no file{why} below {root}", next="correct it, or remove it"
        )
    return sorted(chosen)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        info = path.lstat()
    except OSError:
        return ()
    return (info.st_size, info.st_mtime_ns, info.st_ino, info.st_mode)


def _read_one(root: Path, path: str, *, keep: bool) -> tuple[SourceFile, tuple[int, ...]]:
    full = root / path
    stamp = _stamp(full)
    if not stamp:
        raise changed_while_read(path)
    kind = stamp[3]
    if stat.S_ISLNK(kind):
        target = str(full.readlink())
        size = len(os.fsencode(target))
        return SourceFile(path, sha256_of_text(target), LINK, size, link=target), stamp
    if stat.S_ISDIR(kind):
        return SourceFile(path, hashlib.sha256(b"").hexdigest(), FOLDER, 0), stamp
    if not stat.S_ISREG(kind):
        raise UsageError(f"{path} is neither a file nor a link, so it cannot travel", next="exclude it")
    digest = hashlib.sha256()
    content: bytes | None = None
    try:
        with full.open("rb") as file:
            if keep and stamp[0] <= KEEP_FILE_BYTES:
                content = file.read()
                digest.update(content)
                size = len(content)
            else:
                size = 0
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    size += len(chunk)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", next="exclude it, or mend it") from error
    if size != stamp[0] or _stamp(full) != stamp:
        raise changed_while_read(path)
    mode = PROGRAM if kind & stat.S_IXUSR else FILE
    return SourceFile(path, digest.hexdigest(), mode, size, content=content), stamp


def _check_script(deploy: Deploy, files: list[SourceFile]) -> None:
    """What is renamed over a script must be one: a folder named as the recipe's one file travels with all
    that is in it, or alone where it is empty."""
    script = deploy.script()
    if script is None:
        return
    if [file.path for file in files if file.mode in (FILE, PROGRAM, LINK)] != [script["path"]]:
        raise UsageError(
            f"{script['path']} is not a file, and 'to' is for a single script",
            where="deploy.to",
            next="name the script itself in deploy.include, or remove 'to'",
        )


def _check_secrets(deploy: Deploy, root: Path, files: list[SourceFile]) -> None:
    for file in files:
        if file.mode not in (FILE, PROGRAM) or names_literally(file.path, deploy.include):
            continue
        reason = secret_reason(file.path, file.content or b"")
        if reason:
            raise UsageError(
                f"{file.path} looks like a secret ({reason}) and stays here",
                next=f"exclude it; if it must travel, name it in full in deploy.include: {file.path}",
            )


def _check_links(files: list[SourceFile]) -> None:
    """A link must lead to something that travels too; otherwise it would be broken, or leave the tree."""
    there = {file.path for file in files}
    there |= {parent for path in there for parent in parents(path)}
    for file in files:
        if file.link is None:
            continue
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file.path), file.link))
        if file.link.startswith("/") or target == ".." or target.startswith("../"):
            what = f"{file.path} is a link that leaves the tree (to {file.link})"
            raise UsageError(what, next="exclude it, or copy the file")
        if target not in there and target != ".":
            raise UsageError(
                f"{file.path} is a link to {file.link}, which is not deployed", next=f"include {target} too"
            )
