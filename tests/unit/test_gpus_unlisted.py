"""Run with: pytest tests/unit/test_gpus_unlisted.py. Processes on devices that nvidia-smi does not list
(slices of a GPU, a lost one), and times of a host whose clock is not the laptop's."""

from __future__ import annotations

import time
from typing import Any

from gpu_kit import CONTAINER_NS, EIGHT, HOST, HOST_NS, INSIDE, answer, judge, process, reading, row

from dflashctl.gpus import show
from dflashctl.gpus.facts import judge_facts

SLICED = reading(*(row(index, busy="[N/A]" if index in (2, 5) else "0") for index in range(8)))


def facts(sample: dict[str, Any], uuid: str, **more: Any) -> dict[str, Any]:
    apps = reading(f"9000, [N/A], {uuid}, python")
    return answer(
        sample, apps=apps, processes={"9000": process(9000, 312, CONTAINER_NS)}, pidns=HOST_NS, **more
    )


def test_a_slice_that_names_its_gpu_is_that_gpu_s() -> None:
    box = judge(facts(SLICED, "MIG-GPU-2/1/0"))
    assert [gpu.index for gpu in box.gpus if not gpu.idle] == [2]
    assert box.gpus[2].busy == "held by localtls (pid 312)" and box.warnings == ()


def test_a_slice_of_nobody_knows_which_gpu_leaves_no_sliced_one_idle() -> None:
    box = judge(facts(SLICED, "MIG-6a5cf2d8-0000-5f2a-9d3e-1c2b3a4d5e6f"))
    assert [gpu.index for gpu in box.gpus if not gpu.idle] == [2, 5], (
        "slices have no utilisation of their own"
    )
    assert not box.gpus[2].readable and "MIG" in box.gpus[2].busy
    (warning,) = box.warnings
    assert "localtls (pid 312)" in warning and "MIG-6a5cf2d8" in warning


def test_a_process_on_a_lost_gpu_is_told_and_the_others_serve() -> None:
    box = judge(facts(EIGHT, "GPU-gone"))
    assert all(gpu.idle for gpu in box.gpus)
    assert any("GPU-gone" in warning and "localtls (pid 312)" in warning for warning in box.warnings)


def test_since_is_told_by_the_clock_of_the_host() -> None:
    """process() began at 1000.0 there; the laptop's clock is years ahead, or an hour behind."""
    box = judge_facts(HOST, facts(EIGHT, "GPU-3", at=1090.0), INSIDE)
    assert box.at == 1090.0 and show.rows(box)[3][6] == "1m30s"
    assert show.rows(judge_facts(HOST, facts(EIGHT, "GPU-3", at=940.0), INSIDE))[3][6] == "0 s"
    assert show.rows(judge_facts(HOST, facts(EIGHT, "GPU-3"), INSIDE), now=time.time())[3][6] != "1m30s"
