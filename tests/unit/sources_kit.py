"""Small trees of files, and what a deploy takes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl.config.recipe import Deploy
from dflashctl.errors import UsageError
from dflashctl.releases.sources import take_snapshot

sys.path.insert(0, str(Path(__file__).parent))


def tree(root: Path, **files: str) -> Path:
    """Files by name; `__` stands for `/`, `_dot_` for `.`."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def taken(root: Path, *include: str, exclude: tuple[str, ...] = ()) -> list[str]:
    deploy = Deploy(include=list(include) or ["**"], exclude=list(exclude))
    return [file.path for file in take_snapshot(deploy, root).files]


def refused(root: Path, *include: str) -> str:
    with pytest.raises(UsageError) as caught:
        taken(root, *include)
    return str(caught.value)


def git(root: Path, *words: str) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *identity, *words], cwd=root, env=env, check=True, capture_output=True)
