"""A finished run to go on from, once a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_runs import small_library
from saved_runs import train
from test_kill_and_resume import section
from tiny_models import save_target

from trainer.checkpoint.writer import Writer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A small text, and checkpoints of the very steps that ask for one, however slow the disk is."""
    folder = small_library(tmp_path_factory.mktemp("text") / "library")
    begin = Writer.start

    def start(self: Writer, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self.finish(lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.data.stdlib.root", lambda: folder)
        patch.setattr(Writer, "start", start)
        yield


@pytest.fixture(scope="module")
def finished(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has checkpoints of steps 20, 22, 24, and that nobody may change."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(section(target), folder)
    return folder


@pytest.fixture
def old(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
