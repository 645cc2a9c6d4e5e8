"""Run with: pytest tests/unit/test_known_failures.py. Each pattern finds its own example only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl.probe import expect
from dflashctl.runs import known
from trainer import failures
from trainer.failures import KnownFailure

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("row", known.table(), ids=lambda row: row.name)
def test_a_pattern_finds_its_example_and_no_other(row: KnownFailure) -> None:
    found = [other.name for other in known.table() if other.finds(row.example)]
    assert row.name in found
    assert set(found) - {row.name} == set(row.also)


@pytest.mark.parametrize("row", known.table(), ids=lambda row: row.name)
def test_a_row_says_what_it_means_and_what_to_do(row: KnownFailure) -> None:
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
        "NCCL INFO NET/Plugin: dlerror=libnccl-net.so: cannot open shared object file: No such file",
        "No valid triton configs. OutOfMemoryError: out of resource: t Required: 1. Ignoring this choice.",
        "WARNING urllib3 Retrying: ConnectionResetError(104, 'Connection reset by peer')",
        "mkdir -p failed for path /root/.config/matplotlib: [Errno 30] Read-only file system",
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
        ("[12345.678] Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB", "oom-killer"),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,cpuset=200,oom_memcg=/lxc/200,task=python", "oom-killer"),
        ("RuntimeError: Triton Error [CUDA]: out of memory", "cuda-oom"),
        ("torch.AcceleratorError: CUDA error: out of memory", "cuda-oom"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "cuda-oom"),
        ("shmutils.cc:87 NCCL WARN Call to posix_fallocate failed: No space left on device (28)", "shm-full"),
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 470", "disk-full"),
        ("SafetensorError: Error while serializing: I/O error: No space left (os error 5)", "disk-error"),
        ("failed (exitcode: -11) local_rank: 0 (pid: 4711) of binary: /root/venv/bin/python", "segfault"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB", "main-memory"),
        ("[Rank 0] Terminating the process, due to ProcessGroupNCCL watchdog hang.", "nccl-timeout"),
        ("DistStoreError: Timed out after 601 seconds waiting for clients.", "nccl-timeout"),
        ("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO)", "nccl-error"),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.", "peer-gone"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "no-c-compiler"),
        ("InvalidCxxCompiler: No working C++ compiler found in cpp.cxx", "no-c-compiler"),
        (
            "WARNING: no GPU kernels: Triton cannot build kernels: gcc fails; it needs Python's headers",
            "no-gpu-kernels",
        ),
        ("AssertionError: libcuda.so cannot found!", "triton-launcher-build"),
        ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "triton-ptxas"),
        ("RuntimeError: No valid triton configs. OutOfMemoryError: out of resource: t", "triton-resources"),
        ("RuntimeError: Triton Error [CUDA]: device kernel image is invalid", "driver-too-old"),
        ("RuntimeError: 0 active drivers ([]). There should only be one.", "no-cuda"),
        ("torch.AcceleratorError: CUDA error: capturing stream has unjoined work", "graph-capture-forbidden"),
        ("SystemError: ../Objects/dictobject.c:2323: bad argument to internal function", "dict-systemerror"),
        ("ImportError: /venv/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommX", "library-broken"),
    ],
)
def test_other_wordings_of_the_same_failure(line: str, name: str) -> None:
    assert [row.name for row in known.table() if row.finds(line)] == [name]


@pytest.mark.parametrize("module", ["dflashctl.runs.known", "trainer.failures"])
def test_the_table_is_read_without_torch_and_without_pydantic(module: str) -> None:
    heavy = "sorted(sys.modules.keys() & {'torch', 'pydantic'})"
    code = f"import sys, {module} as known; known.table(); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("module", "rows"),
    [("dflashctl.runs.known", len(known.table())), ("dflashctl.probe.expect", len(expect.table()))],
)
def test_a_project_with_another_program_named_trainer_does_not_hide_the_table(
    module: str, rows: int, tmp_path: Path
) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit('another program')\n")
    head = f"import sys; sys.path.append({str(ROOT)!r})"
    code = f"{head}; from {module} import table; print(len(table()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == f"{rows}\n", done.stderr


def test_what_a_trainer_logs_of_a_failure_is_not_taken_for_another() -> None:
    """The words stand in the log that is searched for the patterns next."""
    assert failures.find(failures.words(failures.table())) == ()


TEXT = """\
[rank1]: W0101 12:00:00 torch/_dynamo/convert_frame.py:1358] torch._dynamo hit config.recompile_limit (8)
torch.OutOfMemoryError: CUDA out of memory. 9.71 GiB is reserved by PyTorch but unallocated.
NVRM: Xid (PCI:0000:41:00): 79, pid=1234, GPU has fallen off the bus.
torch.OutOfMemoryError: CUDA out of memory.
"""


def test_a_text_shows_its_rows_fatal_ones_first_each_once() -> None:
    names = ["cuda-oom", "cuda-fragmentation", "gpu-off-bus", "gpu-xid", "recompile-limit"]
    assert [row.name for row in failures.find(TEXT)] == names
    assert failures.find("step 118 loss 2.31\n") == () and failures.find("") == ()
    assert [row.name for row in known.find(TEXT)] == names


def test_an_error_is_known_by_its_traceback_and_its_causes() -> None:
    def compiled() -> None:
        is_key_in_tls = False
        assert is_key_in_tls, "torch._C._is_key_in_tls(attr_name)"

    try:
        try:
            compiled()
        except AssertionError as error:
            raise RuntimeError("the drafter thread failed") from error
    except RuntimeError as error:
        assert [row.name for row in failures.of_error(error)] == ["cudagraph-trees-tls"]
    assert failures.of_error(ValueError("tap layer 61 is out of range")) == ()


@pytest.mark.parametrize("table", ["version: 2\n", "- [", "version: 1\n", "version: 1\nfailures: 3\n", None])
def test_a_table_that_cannot_be_read_hides_no_error(
    table: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures.table.cache_clear()
    monkeypatch.setattr(failures, "TABLE", tmp_path / "known_failures.yaml")
    if table is not None:
        failures.TABLE.write_text(table)
    try:
        assert failures.of_error(RuntimeError("CUDA out of memory")) == ()
    finally:
        failures.table.cache_clear()


def test_words_say_meaning_versions_and_what_to_do() -> None:
    (row,) = failures.find("assert torch._C._is_key_in_tls(attr_name)")
    head, *do = failures.words((row,)).splitlines()
    assert head == f"known failure cudagraph-trees-tls (torch: <2.13): {row.meaning}"
    assert do == [f"  do: {each}" for each in row.do]
    assert failures.words(()) == ""
    assert failures.as_json((row,)) == [
        {"name": row.name, "meaning": row.meaning, "torch": "<2.13", "do": list(row.do)}
    ]


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
        failures.parse(text)


def test_the_trainers_own_warning_of_kernels_that_it_goes_without_is_none_of_a_dying_run() -> None:
    line = "WARNING: no GPU kernels: Triton cannot build kernels: Failed to find C compiler. Please specify"
    assert [(row.name, row.severity) for row in failures.find(line)] == [("no-gpu-kernels", "warning")]
