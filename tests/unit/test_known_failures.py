"""Run with: pytest tests/unit/test_known_failures.py. Each pattern finds its own example only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl.runs import known

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("row", known.table(), ids=lambda row: row.name)
def test_a_pattern_finds_its_example_and_no_other(row: known.KnownFailure) -> None:
    found = [other.name for other in known.table() if other.finds(row.example)]
    assert row.name in found
    assert set(found) - {row.name} == set(row.also)


@pytest.mark.parametrize("row", known.table(), ids=lambda row: row.name)
def test_a_row_says_what_it_means_and_what_to_do(row: known.KnownFailure) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.name)
    assert len(row.meaning) > 20
    assert row.do
    assert row.torch == "any" or row.torch.startswith(("any (", "<", ">"))


def test_the_table_covers_what_the_design_names() -> None:
    assert {
        "cudagraph-trees-tls", "cudagraph-legacy-pointer", "fx-trace-race", "fx-submodule-race",
        "dict-systemerror", "cuda-oom", "cuda-fragmentation", "nccl-timeout", "gpu-xid", "gpu-off-bus",
        "nvml-lost", "nvml-mismatch", "shm-full", "disk-full", "oom-killer", "hub-unreachable",
        "driver-too-old", "expandable-segments-ipc", "fla-missing",
    } <= set(known.by_name())  # fmt: skip


@pytest.mark.parametrize(
    "healthy",
    [
        "step 118 loss 2.31 12,034 tok/s",
        "compiling forward (cudagraphs=False)",
        "NCCL version 2.27.3+cuda12.9",
        "saving checkpoint to /workspace/ckpt/step_1000.safetensors",
        "memory: 9.71 GiB allocated, 12.00 GiB reserved",
        "warming up thread 3 of 8: no error",
        "0.31 GiB is reserved by PyTorch but unallocated",
    ],
)
def test_a_healthy_line_matches_nothing(healthy: str) -> None:
    assert not [row.name for row in known.table() if row.finds(healthy)]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("    assert torch._C._is_key_in_tls(attr_name)", "cudagraph-trees-tls"),
        ("RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)", "shm-full"),
        ("creating shared memory segment /dev/shm/nccl-a, error: No space left on device (28)", "shm-full"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda-oom"),
        ("  exitcode  : -9 (pid: 1234)", "oom-killer"),
    ],
)
def test_other_wordings_of_the_same_failure(line: str, name: str) -> None:
    assert [row.name for row in known.table() if row.finds(line)] == [name]


def test_the_table_is_read_without_torch() -> None:
    code = "from dflashctl.runs import known; known.table(); import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2\nfailures: []", "another version"),
        (
            "version: 1\nfailures:\n"
            "- {name: x, pattern: '(', severity: fatal, meaning: m, torch: any, do: [d], example: e}",
            "x: pattern",
        ),
        (
            "version: 1\nfailures:\n"
            "- {name: x, pattern: a, severity: bad, meaning: m, torch: any, do: [d], example: e}",
            "no such severity",
        ),
    ],
)
def test_a_broken_table_is_refused_with_the_rows_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        known.parse(text)
