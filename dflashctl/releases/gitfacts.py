"""What git knows about the source of a deploy: commit, what differs from it, and which files it tracks."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class GitFacts:
    """`tracked`, `changed` and `ignored` (files, and folders as a whole) are paths relative to the root that
    was asked about."""

    commit: str
    tracked: frozenset[str] = field(default_factory=frozenset)
    changed: frozenset[str] = field(default_factory=frozenset)
    ignored: frozenset[str] = field(default_factory=frozenset)

    def describe(self, deployed: set[str]) -> tuple[dict[str, object], int]:
        """({"commit", "dirty"}, number of deployed files that differ from the commit)."""
        touched = self.changed & deployed
        return {"commit": self.commit, "dirty": bool(touched)}, len(touched)


def read_git(root: Path) -> GitFacts | None:
    """None without git, outside a repository, before the first commit, or when git refuses to look."""
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    tracked = _git(root, "ls-files", "-z", "--cached")
    whole = ("--untracked-files=all", "--ignored=matching", "--no-renames")
    status = _git(root, "status", "--porcelain=v1", "-z", *whole, "--", ".")
    prefix = _git(root, "rev-parse", "--show-prefix")
    if commit is None or tracked is None or status is None or prefix is None:
        return None
    below = os.fsdecode(prefix.rstrip(b"\n"))
    rows = [
        (row[:2], os.fsdecode(row[3:]).removeprefix(below)) for row in status.split(b"\0") if len(row) > 3
    ]
    return GitFacts(
        commit.decode("ascii").strip(),
        frozenset(os.fsdecode(path) for path in tracked.split(b"\0") if path),
        frozenset(path for kind, path in rows if kind != b"!!"),
        frozenset(path.rstrip("/") for kind, path in rows if kind == b"!!"),
    )


def why_silent(root: Path) -> str:
    """Why git tells nothing of a folder in a repository, in its own words; "" outside of one, and where it
    only has no commit yet."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return ""
    try:
        done = _run(root, "rev-parse", "--git-dir")
    except FileNotFoundError:
        return "git is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"git does not answer: {error}"
    said = done.stderr.decode("utf-8", "replace").strip()
    return "" if done.returncode == 0 else said.partition("\n")[0] or f"git exits with {done.returncode}"


def _git(root: Path, *words: str) -> bytes | None:
    try:
        done = _run(root, *words)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _run(root: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-C", str(root), *words],
        env=env | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
