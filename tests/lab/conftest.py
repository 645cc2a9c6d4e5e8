"""The lab for tests: one of its own for each pytest worker, gone when the worker ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for lab_client

from life_kit import Project

from dflashctl.lab import lifecycle
from dflashctl.lab.gpu import state as gpu_state
from dflashctl.lab.state import LabPaths, Record


@pytest.fixture(scope="session", autouse=True)
def _state_of_the_tests_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What dflashctl writes beside the lab (its log of errors) stays out of the person's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """A lab that is up; DFLASHCTL_LAB_DIR names it for this process and for those that it starts.

    `.endpoint` says how to reach it (user, key, known_hosts, port). A machine that refuses namespaces fails
    here, with the reason: these tests are never skipped in silence.
    """
    before = os.environ.get("DFLASHCTL_LAB_DIR")
    os.environ["DFLASHCTL_LAB_DIR"] = str(tmp_path_factory.mktemp("lab") / "state")
    try:
        yield lifecycle.up().record
        lifecycle.down()
    finally:
        lifecycle.down()
        if before is None:
            del os.environ["DFLASHCTL_LAB_DIR"]
        else:
            os.environ["DFLASHCTL_LAB_DIR"] = before


@pytest.fixture(scope="session")
def lab_paths(lab: Record) -> LabPaths:
    """The files of the `lab` fixture's lab: `.pct`, `.gpu`, `.workspace`, `.disk(200)`, `.log`."""
    return LabPaths(Path(os.environ["DFLASHCTL_LAB_DIR"]))


@pytest.fixture
def project(lab: Record, lab_paths: LabPaths, tmp_path: Path) -> Iterator[Project]:
    """Recipes and a CLI that talk to the `lab` fixture's lab; runs and faults are undone afterwards."""
    made = Project(tmp_path, lab, lab_paths)
    healthy = gpu_state.load(lab_paths.gpu)
    try:
        yield made
    finally:
        gpu_state.save(lab_paths.gpu, healthy)
        made.clean()
        made.engine.close()
