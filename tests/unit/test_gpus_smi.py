"""Run with: pytest tests/unit/test_gpus_smi.py. nvidia-smi's answers, from healthy to hostile."""

from __future__ import annotations

import pytest
from gpu_kit import (
    EIGHT,
    answer,
    judge,
    reading,
    row,
)
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent.gpus import hostfacts
from dflashctl.gpus import smi
from dflashctl.gpus.smi import App, GpuReading


def test_eight_idle_gpus() -> None:
    read = smi.read(answer(EIGHT))
    assert [gpu.index for gpu in read.gpus] == list(range(8))
    assert read.gpus[3] == GpuReading(3, "GPU-3", "NVIDIA H200", 0, 143771, 0, 30, 70.12)
    assert (read.apps, read.problem, read.apps_problem, read.notes) == ((), None, None, ())


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("Failed to initialize NVML: Unknown Error", 255, "device access lost"),
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.144",
            18,
            "reboot the host",
        ),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            9,
            "no NVIDIA driver is loaded",
        ),
        (
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.",
            12,
            "libraries are not installed",
        ),
        ("No devices were found", 6, "no GPU is visible"),
        (
            "Failed to initialize NVML: GPU access blocked by the operating system",
            17,
            "no access to /dev/nvidiactl",
        ),
        ('Field "foo" is not a valid field to query.', 2, "(exit code 2)"),
        ("", 1, "lists no GPU (exit code 1)"),
    ],
)
def test_a_failure_is_told_in_its_own_words_and_ours(text: str, code: int, said: str) -> None:
    read = smi.read(answer(reading(text, exit=code)))
    assert read.gpus == () and read.problem is not None
    assert text.replace("\n", " ") in read.problem and said in read.problem


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("missing", "there is no nvidia-smi"),
        ("timeout", "does not answer"),
        ("[Errno 13] Permission denied", "cannot be run: [Errno 13]"),
    ],
)
def test_no_answer_at_all(problem: str, said: str) -> None:
    read = smi.read(answer(reading(exit=None, problem=problem)))
    assert read.problem is not None and said in read.problem
    assert smi.read({}).problem == "nvidia-smi was not asked"


def test_an_answer_that_never_ends_is_not_told_whole() -> None:
    read = smi.read(answer(reading("0123456789 " * 100_000)))
    assert read.problem is not None and len(read.problem) < 500


def test_an_exit_code_of_zero_without_rows_is_a_failure_too() -> None:
    assert smi.read(answer(reading())).problem == "nvidia-smi lists no GPU"


def test_rows_with_a_bad_exit_code_and_no_reason_are_not_believed() -> None:
    assert smi.read(answer(reading(row(0), exit=255))).problem is not None


@pytest.mark.parametrize(
    "line",
    [
        "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error",
        "Unable to determine the device handle for GPU0000:34:00.0: GPU is lost.  Reboot the system",
        "Unable to determine the device handle for GPU 0000:34:00.0: Unknown Error",
    ],
)
def test_a_lost_gpu_hides_itself_alone(line: str) -> None:
    for code in (15, 255, 0):
        read = smi.read(answer(reading(row(0), line, row(2), exit=code), apps=reading(line, exit=code)))
        assert [gpu.index for gpu in read.gpus] == [0, 2]
        assert read.problem is None and read.apps_problem is None
        assert read.notes == (line,)


def test_a_damaged_inforom_is_a_warning() -> None:
    line = "WARNING: infoROM is corrupted at gpu 0000:C1:00.0"
    apps = reading("589, 1634, GPU-2, python3", line, exit=14)
    read = smi.read(answer(reading(row(0), row(2), line, exit=14), apps=apps))
    assert [gpu.index for gpu in read.gpus] == [0, 2] and [app.pid for app in read.apps] == [589]
    assert (read.problem, read.apps_problem, read.notes) == (None, None, (line,))
    assert smi.read(answer(reading(line, exit=14))).problem is not None, "without rows nothing was read"


@pytest.mark.parametrize(
    ("used", "busy", "problem"),
    [
        ("0", "[GPU requires reset]", "requires reset"),
        ("[GPU requires reset]", "[GPU requires reset]", "requires reset"),
        ("[Unknown Error]", "0", "memory.used reads [Unknown Error]"),
        ("0", "[Unknown Error]", "utilization.gpu reads [Unknown Error]"),
        ("[N/A]", "0", "memory.used reads [N/A]"),
        ("", "0", "memory.used reads nothing"),
        ("0", "[N/A]", None),
        ("0", "[Not Supported]", None),
    ],
)
def test_cells_that_are_no_numbers(used: str, busy: str, problem: str | None) -> None:
    gpu = smi.parse_gpu(row(0, used, busy, temperature="[N/A]", power="[Not Supported]"))
    assert gpu is not None
    assert gpu.problem == problem
    assert gpu.temperature_c is None and gpu.power_w is None


def test_units_are_read_past() -> None:
    gpu = smi.parse_gpu(
        "0, GPU-0, 18203 MiB, 24576 MiB, 97 %, 61, 250.50 W, NVIDIA GeForce RTX 3090, with a comma"
    )
    assert gpu is not None
    assert (gpu.memory_used_mib, gpu.utilization_pct, gpu.power_w) == (18203, 97, 250.5)
    assert gpu.name == "NVIDIA GeForce RTX 3090, with a comma"


@given(st.text(max_size=200), st.integers() | st.none())
def test_no_text_makes_the_parsers_raise(text: str, code: int | None) -> None:
    hostile = {"exit": code, "stdout": text, "stderr": text, "problem": None}
    read = smi.read(answer(hostile, apps=hostile))
    assert read.problem is not None or read.gpus


@given(
    st.lists(
        st.sampled_from(["0", "-1", "[N/A]", "9" * 30, "nan", "1e9", "", "12 MiB", "٣", "²"]), max_size=9
    )
)
def test_no_cell_makes_the_row_parser_raise(cells: list[str]) -> None:
    smi.parse_gpu(", ".join(["0", "GPU-0", *cells]))
    smi.parse_apps(reading(", ".join(cells)))
    hostfacts.app_pids(", ".join(cells))


def test_samples_are_merged_largest_memory_median_utilisation() -> None:
    samples = [reading(row(0, used, busy)) for used, busy in (("4", "0"), ("9", "99"), ("1", "3"))]
    (gpu,) = smi.read(answer(*samples)).gpus
    assert (gpu.memory_used_mib, gpu.utilization_pct, gpu.problem) == (9, 3, None)


def test_one_bad_sample_is_enough() -> None:
    gone = smi.read(answer(reading(row(0), row(1)), reading(row(0))))
    assert [(gpu.index, gpu.problem) for gpu in gone.gpus] == [(0, None), (1, "comes and goes")]
    reset = smi.read(answer(reading(row(0)), reading(row(0, busy="[GPU requires reset]"))))
    assert reset.gpus[0].problem == "requires reset"
    dead = smi.read(answer(reading(row(0)), reading("Failed to initialize NVML: Unknown Error", exit=255)))
    assert dead.gpus == () and dead.problem is not None


def test_processes_on_gpus() -> None:
    lines = ("589, 1634, GPU-0, python3", "590, [N/A], GPU-1, /opt/my app, with comma", "bad, 1, 2, x")
    apps, problem = smi.parse_apps(reading(*lines))
    assert problem is None
    assert apps == (App(589, "GPU-0", 1634, "python3"), App(590, "GPU-1", None, "/opt/my app, with comma"))


@pytest.mark.parametrize("word", ["[N/A]", "[Insufficient Permissions]", "-"])
def test_a_process_whose_pid_is_hidden_holds_its_gpu(word: str) -> None:
    box = judge(answer(EIGHT, apps=reading(f"{word}, {word}, GPU-3, {word}")))
    assert [gpu.idle for gpu in box.gpus] == [index != 3 for index in range(8)]
    assert box.gpus[3].busy.startswith("held by unknown process, pid hidden")


def test_unknown_users_are_not_no_users() -> None:
    read = smi.read(answer(EIGHT, apps=reading("Failed to initialize NVML: Unknown Error", exit=255)))
    assert read.problem is None and read.apps_problem is not None
    box = judge(answer(EIGHT, apps=reading("Failed to initialize NVML: Unknown Error", exit=255)))
    assert not any(gpu.idle for gpu in box.gpus)
