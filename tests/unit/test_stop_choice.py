"""Run with: pytest tests/unit/test_stop_choice.py. Which run is meant, and whether GPUs are free after."""

from __future__ import annotations

from typing import Any

import pytest

from dflashctl.errors import NotFound, UsageError
from dflashctl.gpus.holders import Holder
from dflashctl.gpus.idle import Box, Gpu
from dflashctl.gpus.smi import GpuReading
from dflashctl.runs.stop import check_freed, choose_targets, not_done

RUNS = [{"id": "2", "tag": "b"}, {"id": "1", "tag": "a"}]


def test_without_a_name_the_only_live_run_is_meant() -> None:
    assert choose_targets(RUNS[:1], None, everything=False, host="h") == RUNS[:1]
    with pytest.raises(UsageError, match=r"2 runs are live: b \(2\), a \(1\)"):
        choose_targets(RUNS, None, everything=False, host="h")
    with pytest.raises(NotFound, match="no run is live"):
        choose_targets([], None, everything=False, host="h")


def test_a_name_is_a_tag_or_an_id() -> None:
    assert choose_targets(RUNS, "a", everything=False, host="h") == RUNS[1:]
    assert choose_targets(RUNS, "2", everything=False, host="h") == RUNS[:1]
    assert choose_targets(RUNS, "c", everything=False, host="h") == []
    assert choose_targets(RUNS, None, everything=True, host="h") == RUNS
    assert choose_targets([], None, everything=True, host="h") == []


def gpu(
    index: int, used: int = 0, busy: str = "", holders: tuple[Holder, ...] = (), readable: bool = True
) -> Gpu:
    return Gpu(GpuReading(index, f"U{index}", "H200", used, 143771, 0, 30, 70.0), holders, 64, busy, readable)


def holder(kind: Any, run_id: str | None = None) -> Holder:
    return Holder(kind, 5, 100, "python", run_id=run_id, tag=run_id, command="python x.py", user="ada")


def freed(*gpus: Gpu, problem: str | None = None) -> Any:
    recorded = [{"index": 0, "uuid": "U0"}]
    return check_freed(recorded, Box(gpus, problem), ["me"])[0]


def test_a_free_gpu_is_free() -> None:
    one = freed(gpu(0), gpu(1, busy="held by x", holders=(holder("host"),)))
    assert one.fine and one.free and one.words == "free, 0 MiB"
    assert not_done("h", [], [one]) is None


def test_a_stranger_on_the_gpu_is_no_success() -> None:
    one = freed(gpu(0, 100, "held by host process", (holder("host"),)))
    assert not one.fine and not one.settling
    error = not_done("h", [], [one])
    assert (
        error is not None and error.exit_code == 9 and "GPU 0 is not free: held by host process" in error.what
    )


def test_another_user_s_processes_are_told_from_those_that_no_signal_ends() -> None:
    process = {"pid": 7, "cmdline": ["sleep", "9"], "state": "S"}
    problems = ["pid 7 (sleep): [Errno 1] Operation not permitted"]
    error = not_done("h", [{"survivors": [process], "problems": problems}], [])
    assert error is not None and error.next == "it is another user's: kill it as that user, or as root"
    error = not_done("h", [{"survivors": [process], "problems": []}], [])
    assert error is not None and "another user" not in error.next


def test_another_run_on_the_gpu_is_its_own_affair() -> None:
    assert freed(gpu(0, 100, "held by other", (holder("run", "other"),))).fine
    mixed = freed(gpu(0, 100, "held by both", (holder("run", "other"), holder("run", "me"))))
    assert not mixed.fine


@pytest.mark.parametrize(
    "one",
    [
        gpu(0, 100, "held by me", (holder("run", "me"),)),
        gpu(0, 300, "300 MiB in use, and no process has it"),
        gpu(0, 0, "utilisation 40 %"),
    ],
)
def test_memory_that_drains_is_waited_for_and_then_refused(one: Gpu) -> None:
    state = freed(one)
    assert state.settling and not state.fine
    assert not_done("h", [], [state]) is not None


def test_what_cannot_be_read_is_not_claimed_free() -> None:
    assert freed(gpu(1)).words == "not known: it is missing from what nvidia-smi lists"
    broken = freed(problem="nvidia-smi does not answer")
    assert not broken.fine and not broken.settling and broken.words == "not known: nvidia-smi does not answer"
    assert not freed(gpu(0, busy="requires reset", readable=False)).fine


def test_survivors_are_named_with_state_and_way_out() -> None:
    process = {
        "pid": 7,
        "cmdline": ["python", "x.py"],
        "comm": "python",
        "state": "D",
        "wchan": "nvidia_close",
    }
    error = not_done("h", [{"survivors": [process]}], [])
    assert error is not None
    assert "cannot be killed: pid 7 (python x.py), state D in nvidia_close" in error.what
    assert "reboot" in error.next
