"""Run with: pytest tests/unit/test_gpus_unlisted.py. Processes on devices that nvidia-smi does not list
(slices of a GPU, a lost one), and times of a host whose clock is not the laptop's."""

from __future__ import annotations

import time
from typing import Any

import pytest
from gpu_kit import (
    CONTAINER_NS,
    EIGHT,
    HOST,
    HOST_NS,
    INSIDE,
    MIG_COLUMNS,
    answer,
    judge,
    mig_row,
    process,
    reading,
)

from dflashctl.gpus import show
from dflashctl.gpus.choose import NoSuchGpus, Wish, choose
from dflashctl.gpus.facts import judge_facts

MODES = {2: ("Enabled", "[N/A]"), 5: ("Enabled", "[N/A]"), 6: ("[N/A]", "0")}
SLICED = reading(*(mig_row(index, *MODES.get(index, ("Disabled", "0"))) for index in range(8)))
FIELDS = {"gpu": list(MIG_COLUMNS)}


def facts(sample: dict[str, Any], uuid: str, **more: Any) -> dict[str, Any]:
    apps = reading(f"9000, [N/A], {uuid}, python")
    return answer(
        sample, apps=apps, processes={"9000": process(9000, 312, CONTAINER_NS)}, pidns=HOST_NS, **more
    )


def test_a_gpu_in_mig_mode_is_never_whole_though_nobody_holds_it() -> None:
    box = judge(answer(SLICED, fields=FIELDS))
    assert [gpu.index for gpu in box.gpus if not gpu.idle] == [2, 5]
    assert [gpu.reading.mig for gpu in box.gpus[:7]] == [False, False, True, False, False, True, None]
    assert "nvidia-smi -i 5 -mig 0" in box.gpus[5].busy and "MIG" in show.row(box.gpus[5], 0.0)[-1]
    assert [gpu["mig"] for gpu in show.as_json(box)["gpus"]][1:3] == [False, True]
    for allow_busy in (False, True):
        taken = choose(box, Wish(count=6), allow_busy=allow_busy)
        assert [gpu.index for gpu in taken] == [0, 1, 3, 4, 6, 7]
        for wish, said in (
            (Wish(count=7), "nvidia-smi -i 2 -mig 0"),
            (Wish(names=(2,)), "nvidia-smi -i 2 -mig 0"),
            (Wish(names=("MIG-6a5cf2d8",)), "no slices"),
        ):
            with pytest.raises(NoSuchGpus) as error:  # nothing to wait for
                choose(box, wish, allow_busy=allow_busy)
            assert said in error.value.what


def test_a_slice_that_names_its_gpu_is_that_gpu_s() -> None:
    box = judge(facts(SLICED, "MIG-GPU-2/1/0", fields=FIELDS))
    assert [gpu.index for gpu in box.gpus if gpu.holders] == [2]
    assert box.gpus[2].holders[0].label == "localtls (pid 312)" and box.warnings == ()
    assert "MIG" in box.gpus[2].busy and "localtls" in show.row(box.gpus[2], 0.0)[-1], "both are told"


def test_a_slice_of_nobody_knows_which_gpu_is_a_warning() -> None:
    box = judge(facts(SLICED, "MIG-6a5cf2d8-0000-5f2a-9d3e-1c2b3a4d5e6f", fields=FIELDS))
    assert [gpu.index for gpu in box.gpus if not gpu.idle] == [2, 5]
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
