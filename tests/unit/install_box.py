"""A laptop's folder and a container's folders without a container, to test agent/releases/install.py."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent import AgentError
from dflashctl.agent.processes import proc
from dflashctl.agent.records import runfolder
from dflashctl.agent.releases import install, release
from dflashctl.config.recipe import Deploy
from dflashctl.releases.archive import pack
from dflashctl.releases.sources import Snapshot, SourceFile, take_snapshot

PROGRAM = {
    "prog/__init__.py": "",
    "prog/a.py": "import os\ngraphs = False\n",
    "prog/data.txt": "same\n",
    "prog/copy.txt": "same\n",
    "run.sh": "#!/bin/sh\n",
}


def write_archive(snapshot: Snapshot, files: Iterable[SourceFile], path: Path) -> int:
    """An archive as it arrives inside; returns its size."""
    archive = pack(snapshot, files)
    path.write_bytes(b"".join(archive.pieces))
    assert path.stat().st_size == archive.size, "the size is known before the first byte"
    return archive.size


class Emit:
    """Collects progress; `gone` says that nobody listens."""

    def __init__(self, gone: bool = False) -> None:
        self.events: list[dict[str, Any]] = []
        self.gone = gone

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class Box:
    """A laptop's folder and a container's folders, without a container."""

    def __init__(self, root: Path) -> None:
        self.source = root / "laptop"
        self.code_root = root / "code"
        self.state_dir = root / "state"
        self.code_root.mkdir()
        for name, text in PROGRAM.items():
            self.write(name, text)
        (self.source / "run.sh").chmod(0o755)

    def write(self, name: str, text: str) -> None:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def snapshot(self) -> Snapshot:
        return take_snapshot(Deploy(include=["**"]), self.source)

    def facts(self, snapshot: Snapshot, prepare: bool = True) -> dict[str, Any]:
        want = [file.sha256 for file in snapshot.files]
        request = {"code_root": str(self.code_root), "state_dir": str(self.state_dir), "want": want}
        return install.release_facts({**request, "prepare": prepare}, Emit())

    def request(self, snapshot: Snapshot, send: bool = True, **changes: Any) -> dict[str, Any]:
        """A request, its archive already in place; only what the facts do not claim to have is packed."""
        deploy_id = secrets.token_hex(8)
        size = None
        have = set(self.facts(snapshot)["have"])
        files = [file for file in snapshot.files if file.sha256 not in have and file.mode.startswith("100")]
        if send and files:
            size = write_archive(snapshot, files, self.archive(deploy_id))
        return {
            "code_root": str(self.code_root),
            "state_dir": str(self.state_dir),
            "id": deploy_id,
            "release": snapshot.release,
            "files": snapshot.manifest(),
            "archive_size": size,
            "keep": 5,
            "expect": [],
            "entry": "prog",
            "pythonpath": "",
            "recipe": "warm",
            "git": {"commit": "1c9e4d", "dirty": True},
            "who": "anna@laptop",
            "wait_s": 0,
            **changes,
        }

    def archive(self, deploy_id: str) -> Path:
        return Path(install.incoming_path(str(self.code_root), deploy_id))

    def deploy(self, **changes: Any) -> dict[str, Any]:
        return install.install_release(self.request(self.snapshot(), **changes), Emit())

    def current(self) -> str | None:
        return release.current_release(str(self.code_root))

    def releases(self) -> list[str]:
        return release.list_releases(str(self.code_root))

    def litter(self) -> list[str]:
        """Everything that is neither a release nor one of the lasting names."""
        names = [p.name for p in self.code_root.iterdir()]
        lasting = {"releases", "current", "history.jsonl", ".lock"}
        found = [name for name in names if name not in lasting]
        folder = self.code_root / "releases"
        return found + [p.name for p in folder.iterdir() if len(p.name) != 64] if folder.is_dir() else found

    def run(self, release_name: str, *, live: bool = True, elsewhere: bool = False) -> str:
        """A run's folder that names a release."""
        folder = runfolder.folder_of(str(self.state_dir), runfolder.new_id())
        Path(folder.path).mkdir(parents=True)
        here = {"boot_id": "another", "init_start": 1} if elsewhere else proc.here()
        folder.write("record.json", {"id": folder.id, "tag": "t", "release": release_name, **here})
        if not live:
            folder.write("exit.json", {"code": 0})
        return folder.id


@contextlib.contextmanager
def refused(kind: str = "verification") -> Iterator[list[AgentError]]:
    caught: list[AgentError] = []
    with pytest.raises(AgentError) as info:
        yield caught
    caught.append(info.value)
    assert info.value.kind == kind


def unharmed(box: Box, name: str) -> None:
    assert box.current() == name
    assert box.releases() == [name]
    assert box.litter() == []
