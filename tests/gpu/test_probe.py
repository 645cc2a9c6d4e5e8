"""Run on a machine with a GPU: pytest -m gpu tests/gpu/test_probe.py. The probes' answers against the table
of known failures; `-s` shows them, for docs/probe.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflashctl.cli import main as frame

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]


@pytest.fixture
def probe(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Any:
    """Run `dflashctl probe` on this machine; (exit code, what it printed)."""
    (tmp_path / "work").mkdir()
    host = {
        "engine": "local",
        "python": sys.executable,
        "state_dir": str(tmp_path / "state"),
        "workdir": str(tmp_path / "work"),
    }
    document = {"version": 1, "defaults": {"host": "here"}, "hosts": {"here": host}}
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(tmp_path / "hosts.yaml"))

    def run(*words: str) -> tuple[int, str]:
        code = frame.run(["probe", *words])
        shown = capfd.readouterr()
        print(shown.out, shown.err)
        return code, shown.out + shown.err

    return run


def test_the_threads_matrix_is_as_the_table_expects(probe: Any) -> None:
    code, shown = probe("threads")
    assert code == 0 and "DIFFERS" not in shown, shown


def test_a_compiled_and_a_captured_step_equal_the_plain_one(probe: Any) -> None:
    code, shown = probe("step")
    assert code == 0, shown


def test_one_gpu_is_shared_by_two_processes(probe: Any) -> None:
    code, shown = probe("ipc", "--case", "host-memory,one-gpu,expandable-segments")
    assert code == 0, shown


def test_several_gpus(probe: Any, gpus: int) -> None:
    if gpus < 2:
        pytest.skip("DID NOT RUN: torch sees one GPU, these need two")
    for words in (["p2p"], ["nccl"], ["ipc", "--case", "two-gpus"]):
        code, shown = probe(*words)
        assert code == 0, shown


def test_a_collective_of_one(probe: Any) -> None:
    code, shown = probe("nccl", "--case", "gloo,one-gpu")
    assert code == 0, shown
