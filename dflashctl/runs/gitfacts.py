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


def _git(root: Path, *words: str) -> bytes | None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
