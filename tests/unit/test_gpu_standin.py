"""The simulated GPUs: what the client prints, byte for byte, and a driver that hangs or is not there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_standin_kit import ROOT, Lab, wait_for
from gpu_standin_kit import lab as lab

from dflashctl.lab.gpu import Box, change, load


def test_idle_box_in_the_four_csv_forms(lab: Lab) -> None:
    query = "--query-gpu=index,memory.used,utilization.gpu"
    assert lab.smi(query, "--format=csv,noheader").stdout.splitlines()[:5] == [
        "0, 0 MiB, 0 %",
        "1, 0 MiB, 0 %",
        "2, 0 MiB, 0 %",
        "3, 0 MiB, 0 %",
        "4, 4 MiB, 0 %",
    ]
    full = lab.smi(query, "--format=csv").stdout.splitlines()
    assert full[0] == "index, memory.used [MiB], utilization.gpu [%]" and len(full) == 9
    assert lab.smi(query, "--format=csv,nounits").stdout.startswith(
        "index, memory.used, utilization.gpu\n0, 0, 0"
    )
    assert lab.smi(query, "--format=csv,noheader,nounits").stdout.splitlines()[4] == "4, 4, 0"


def test_idle_box_has_no_compute_apps(lab: Lab) -> None:
    done = lab.smi("--query-compute-apps=pid,used_memory,gpu_uuid,process_name", "--format=csv,noheader")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


MODES = [
    ("unknown", 255, "Failed to initialize NVML: Unknown Error\n"),
    ("nodriver", 9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
    ("nolib", 12, "NVIDIA-SMI couldn't find libnvidia-ml.so library"),
    (
        "mismatch",
        18,
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n",
    ),
    ("nodevices", 6, "No devices were found\n"),
    ("blocked", 17, "Failed to initialize NVML: GPU access blocked by the operating system\n"),
]


@pytest.mark.parametrize(("mode", "code", "text"), MODES)
def test_a_broken_driver_says_so_on_stdout(lab: Lab, mode: str, code: int, text: str) -> None:
    change(lab.dir, lambda box: setattr(box, "mode", mode))
    for args in (["--query-gpu=index", "--format=csv,noheader"], ["-L"], []):
        done = lab.smi(*args)
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout.startswith(text)


def set_fault(index: int, fault: str) -> Callable[[Box], None]:
    return lambda box: setattr(box.gpu(index), "fault", fault)


def test_a_gpu_that_requires_reset_looks_free(lab: Lab) -> None:
    lab.holder("2", DFLASH_LAB_GPU_MIB="7000")
    change(lab.dir, set_fault(2, "reset"))
    done = lab.smi("--query-gpu=index,utilization.gpu,power.draw,memory.used", "--format=csv,noheader")
    assert done.returncode == 0
    assert done.stdout.splitlines()[2] == "2, [GPU requires reset], [GPU requires reset], 0 MiB"


@pytest.mark.parametrize(
    ("fault", "code", "words"), [("lost", 15, "GPU is lost"), ("handle", 255, "Unknown Error")]
)
def test_a_lost_gpu_is_named_and_the_others_are_listed(lab: Lab, fault: str, code: int, words: str) -> None:
    change(lab.dir, set_fault(1, fault))
    done = lab.smi("--query-gpu=index", "--format=csv,noheader")
    lines = done.stdout.splitlines()
    assert done.returncode == code
    assert lines[0].startswith("Unable to determine the device handle for GPU1: 0000") and words in lines[0]
    assert lines[1:] == ["0", "2", "3", "4", "5", "6", "7"]


def test_a_missing_gpu_is_silent_and_renumbers_the_others(lab: Lab) -> None:
    uuids = [g.uuid for g in load(lab.dir).gpus]
    change(lab.dir, set_fault(0, "missing"))
    done = lab.smi("--query-gpu=index,uuid,count", "--format=csv,noheader")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"{n}, {uuid}, 7" for n, uuid in enumerate(uuids[1:])]


def test_device_files_decide_what_a_caller_sees(lab: Lab, tmp_path: Path) -> None:
    """A caller whose /dev/nvidia0 is another file misses that GPU; without nvidiactl it is blocked."""
    uuids = [g.uuid for g in load(lab.dir).gpus]
    dev = tmp_path / "dev"
    dev.mkdir()
    (dev / "nvidia0").touch()
    for n in range(1, 8):
        (dev / f"nvidia{n}").symlink_to(lab.dir / "dev" / f"nvidia{n}")
    (dev / "nvidiactl").symlink_to(lab.dir / "dev" / "nvidiactl")
    done = lab.smi("--query-gpu=uuid", "--format=csv,noheader", NVIDIA_LAB_DEV=str(dev))
    assert (done.returncode, done.stdout.split()) == (0, uuids[1:])
    (dev / "nvidiactl").unlink()
    done = lab.smi("-L", NVIDIA_LAB_DEV=str(dev))
    assert (done.returncode, done.stdout.split(":")[0]) == (17, "Failed to initialize NVML")


def test_unsupported_cells_are_bracketed_and_have_no_unit(lab: Lab) -> None:
    change(lab.dir, lambda box: box.gpu(1).fields.update({"memory.used": "[Unknown Error]"}))
    done = lab.smi("--query-gpu=index,fan.speed,memory.used", "--format=csv,noheader")
    assert done.stdout.splitlines()[:2] == ["0, [N/A], 0 MiB", "1, [N/A], [Unknown Error]"]


NO_GPU = "GPU-00000000-0000-0000-0000-000000000000"


ONE = ["--query-gpu=index", "--format=csv,noheader"]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--query-gpu=index,foo", "--format=csv"], 2, 'Field "foo" is not a valid field to query.\n\n'),
        (["--query-compute-apps=pid,gpu_index"], 2, 'Field "gpu_index" is not a valid field to query.\n\n'),
        (["--query-gpu=index", "--format=csv,foo"], 2, "Format modifier is not recognized.\n"),
        (["-i", "99", *ONE], 6, "No devices were found\n"),
        (["-i", NO_GPU, *ONE], 6, "No devices were found\n"),
        (["-i", "1,99", *ONE], 0, "1\n"),
        (["--query-gpu", "index", "--format", "csv,noheader", "-i", "3"], 0, "3\n"),
        (["-i", "3", "--query-gpu=index"], 0, "index\n3\n"),
        (["-i", NO_GPU, "-L"], 2, "ERROR: Option -i is not valid for this command. "),
        (["--foo"], 255, "ERROR: Option --foo is not recognized. Please run 'nvidia-smi -h'.\n\n"),
        (["-q", "-d", "FOO"], 2, "Failed to parse --display/-d flags\n"),
    ],
)
def test_odd_questions_get_the_observed_answers(lab: Lab, args: list[str], code: int, text: str) -> None:
    done = lab.smi(*args)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout == text if text.endswith("\n") else done.stdout.startswith(text)


def test_choice_by_index_and_uuid(lab: Lab) -> None:
    uuid = load(lab.dir).gpu(6).uuid
    for how in (["-i", f"{uuid},2"], [f"--id=2,{uuid}"]):
        done = lab.smi(*how, "--query-gpu=index,uuid", "--format=csv,noheader")
        assert [line.split(", ")[0] for line in done.stdout.splitlines()] == ["2", "6"]


def test_plain_table(lab: Lab) -> None:
    holder = lab.holder("2", DFLASH_LAB_GPU_MIB="1542")
    lines = lab.smi().stdout.splitlines()
    assert {len(line) for line in lines[1:] if line} == {91}
    assert any(re.search(rf"\\| +2 +N/A +N/A +{holder.pid} +C .* 1542MiB \\|", line) for line in lines)


def test_list_topology_and_health_report(lab: Lab) -> None:
    gpus = lab.smi("-L").stdout.splitlines()
    assert len(gpus) == 8
    assert all(
        re.fullmatch(r"GPU \d: NVIDIA H200 \(UUID: GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\)", g)
        for g in gpus
    )
    matrix = lab.smi("topo", "-m").stdout.splitlines()
    assert matrix[0].replace("\x1b[4m", "").split("\t")[1:9] == [f"GPU{n}" for n in range(8)]
    assert matrix[3].split("\t")[1:9] == ["NV18", "NV18", " X ", *["NV18"] * 5]

    def hurt(box: Box) -> None:
        box.gpu(5).ecc_volatile_uncorrectable = 3
        box.gpu(5).xid = [94]

    change(lab.dir, hurt)
    ecc = lab.smi("-q", "-d", "ECC,ROW_REMAPPER", "-i", "5").stdout
    assert re.search(r"DRAM Uncorrectable +: 3\n", ecc) and re.search(r"Pending +: Yes\n", ecc)
    whole = lab.smi("-q").stdout
    assert (
        whole.count("DRAM Uncorrectable                         : 3") == 1
        and whole.count("Remapped Rows") == 8
    )


def test_a_hanging_driver_never_answers_and_ends_with_the_driver(lab: Lab) -> None:
    change(lab.dir, lambda box: setattr(box, "mode", "hang"))
    stuck = lab.start([str(lab.dir / "bin" / "nvidia-smi"), "-L"])
    with pytest.raises(subprocess.TimeoutExpired):
        stuck.wait(1.5)
    lab.stop_driver()
    assert stuck.wait(10) != 0
    assert stuck.stdout is not None and stuck.stdout.read() == ""


def test_a_client_ends_at_once_when_told_and_leaves_nothing(lab: Lab) -> None:
    change(lab.dir, lambda box: setattr(box, "mode", "hang"))
    stuck = lab.start([str(lab.dir / "bin" / "nvidia-smi"), "-L"])
    wait_for(lambda: list((lab.dir / "rpc" / "calls").glob("*/pidns")) != [])
    stuck.terminate()
    assert stuck.wait(30) == 143
    wait_for(lambda: list((lab.dir / "rpc" / "calls").iterdir()) == [])


def test_without_a_driver_the_client_says_so(lab: Lab, tmp_path: Path) -> None:
    assert lab.smi("-L").returncode == 0
    lab.stop_driver()
    done = lab.smi("-L", NVIDIA_LAB_DEADLINE_S="1")
    assert done.returncode == 97 and "the GPU driver process is gone" in done.stderr and done.stdout == ""
    done = lab.smi("-L", NVIDIA_LAB_RPC=str(tmp_path / "nowhere"))
    assert done.returncode == 96 and "not mounted here" in done.stderr


def test_a_driver_process_that_is_stopped_meets_the_clients_deadline(lab: Lab) -> None:
    lab.stop_driver()
    driver = lab.start([sys.executable, "-m", "dflashctl.lab.gpu.driver", str(lab.dir)], PYTHONPATH=str(ROOT))
    assert lab.smi("-L").returncode == 0
    driver.send_signal(signal.SIGSTOP)
    done = lab.smi("-L", NVIDIA_LAB_DEADLINE_S="1")
    assert done.returncode == 97 and "no answer within 1 s" in done.stderr
    driver.send_signal(signal.SIGCONT)
    driver.terminate()
    assert driver.wait(10) == 0


def test_the_client_needs_neither_python_nor_an_environment(lab: Lab) -> None:
    text = (lab.dir / "bin" / "nvidia-smi").read_text()
    assert text.startswith("#!/bin/sh\n") and "python" not in text.split("PATH=", 1)[1]
    env = {k: v for k, v in lab.env.items() if k.startswith("NVIDIA_LAB")}
    done = subprocess.run([lab.dir / "bin" / "nvidia-smi", "-L"], env=env, capture_output=True, timeout=20)
    assert done.returncode == 0 and done.stdout.count(b"\n") == 8


def test_many_callers_at_once_get_their_own_answers(lab: Lab) -> None:
    results: dict[int, str] = {}

    def ask(n: int) -> None:
        results[n] = lab.smi("-i", str(n % 8), "--query-gpu=index", "--format=csv,noheader").stdout

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(24)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert results == {n: f"{n % 8}\n" for n in range(24)}


def test_a_misspelt_fault_is_an_error_not_a_healthy_gpu(lab: Lab) -> None:
    with pytest.raises(ValueError, match="falt"):
        change(lab.dir, set_fault(0, "falt"))
    (lab.dir / "state.json").write_text('{"version": 1, "gpus": [], "moode": "hang"}')
    done = lab.smi("-L")
    assert done.returncode == 95 and "moode" in done.stdout
