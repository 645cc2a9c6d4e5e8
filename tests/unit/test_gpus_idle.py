"""Run with: pytest tests/unit/test_gpus_idle.py. Who holds what, what is idle, what a run gets."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_kit import (
    CONTAINER_NS,
    EIGHT,
    HOST,
    HOST_NS,
    INSIDE,
    NESTED_NS,
    OTHER_NS,
    answer,
    judge,
    process,
    reading,
    row,
)

from dflashctl.config.hosts import IdleRule
from dflashctl.config.recipe import LaunchGpus
from dflashctl.errors import GpusBusy, UsageError
from dflashctl.gpus import facts as gpufacts
from dflashctl.gpus import show
from dflashctl.gpus.choose import NoSuchGpus, Wish, choose, parse, surprise, wish_of
from dflashctl.gpus.holders import Holder, holders
from dflashctl.gpus.idle import TOLERANCE_MIB, Box, limit_mib
from dflashctl.gpus.smi import App
from dflashctl.runs.stop import freed_words


def held(described: dict[str, Any] | None, inside: dict[str, Any] = INSIDE, pidns: int = HOST_NS) -> Holder:
    apps = (App(9000, "GPU-0", 1634, "python"),)
    found = holders(apps, {"processes": {"9000": described}, "pidns": pidns}, inside, container=200)
    (holder,) = found["GPU-0"]
    return holder


def test_a_process_of_a_run_has_its_tag_and_inner_pid() -> None:
    holder = held(process(9000, 312, CONTAINER_NS))
    assert (holder.kind, holder.tag, holder.run_id, holder.inner_pid) == ("run", "localtls", "R1", 312)
    assert holder.label == "localtls (pid 312)"


def test_a_process_in_a_namespace_below_the_container_is_the_runs_too() -> None:
    nested = process(9000, 7, NESTED_NS)
    nested["nspid"] = [9000, 400, 7]
    assert held(nested).tag == "localtls"


def test_a_recycled_pid_is_not_the_runs() -> None:
    assert held(process(9000, 312, CONTAINER_NS, start=51)).kind == "container"


def test_the_same_inner_pid_of_another_container_is_not_the_runs() -> None:
    other = held(process(9000, 312, OTHER_NS, cgroup="0::/lxc/201/ns/app\n"))
    assert (other.kind, other.container) == ("other_container", "201")
    assert other.label == "container 201, pid 9000 on the host: python train.py"


@pytest.mark.parametrize(
    ("described", "kind", "label"),
    [
        (process(9000, 999, CONTAINER_NS), "container", "container process, pid 999: python train.py"),
        (process(9000, 9000, HOST_NS), "host", "host process, pid 9000, user 100000: python train.py"),
        (
            process(9000, 9, OTHER_NS),
            "other_container",
            "another container, pid 9000 on the host: python train.py",
        ),
        (
            process(9000, 9, None, cgroup="4:memory:/lxc.payload.200/x\n0::/\n"),
            "container",
            "container process, pid 9: python train.py",
        ),
        (process(9000, 9, None, cgroup="0::/lxc/201\n"), "other_container", None),
        (process(9000, 9, None), "unknown", "unknown process, pid 9000: python train.py"),
        (None, "unknown", "unknown process, pid 9000: python"),
    ],
)
def test_everybody_else_is_named_too(described: Any, kind: str, label: str | None) -> None:
    holder = held(described)
    assert holder.kind == kind
    assert label is None or holder.label == label


def test_without_the_right_to_see_namespaces_pid_and_start_decide() -> None:
    assert held(process(9000, 312, None)).tag == "localtls"
    assert held(process(9000, 312, None, start=51)).kind == "unknown"


def test_on_a_bare_machine_host_and_inside_are_one() -> None:
    inside = {**INSIDE, "pidns": HOST_NS}
    inside["runs"] = [{**INSIDE["runs"][0], "family": [{"nspid": 9000, "pidns": HOST_NS, "start": 50}]}]
    assert held(process(9000, 9000, HOST_NS), inside).tag == "localtls"
    assert held(process(9000, 9000, HOST_NS, start=1), inside).kind == "host"


def test_one_gpu_may_have_several_holders_in_order() -> None:
    apps = (App(1, "GPU-0", 1, "a"), App(2, "GPU-0", 2, "b"), App(3, "GPU-1", 3, "c"))
    found = holders(apps, {"processes": {}}, INSIDE)
    assert [holder.pid for holder in found["GPU-0"]] == [1, 2]
    assert [holder.pid for holder in found["GPU-1"]] == [3]


@pytest.mark.parametrize(
    ("used", "busy", "rule", "why"),
    [
        ("0", "0", {}, ""),
        (str(TOLERANCE_MIB), "5", {}, ""),
        (str(TOLERANCE_MIB + 1), "0", {}, "65 MiB in use (idle: 64 MiB at most), and no process has it"),
        ("0", "6", {}, "utilisation 6 % (idle: 5 %)"),
        ("0", "[N/A]", {}, ""),
        ("0", "[GPU requires reset]", {}, "requires reset"),
        ("300", "0", {"memory_mib": 300}, ""),
        ("1", "0", {"memory_mib": 0}, "1 MiB in use (idle: 0 MiB at most), and no process has it"),
    ],
)
def test_what_is_idle(used: str, busy: str, rule: dict[str, Any], why: str) -> None:
    gpu = judge(answer(reading(row(0, used, busy))), **rule).gpus[0]
    assert gpu.busy == why and gpu.idle is (why == "")


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]"])
def test_a_gpu_that_shares_the_machines_memory_is_judged_by_who_holds_it(word: str) -> None:
    """GB10, Jetson: no figure of memory at all, so it was never idle, and nothing could be launched."""
    line = f"0, GPU-0, {word}, {word}, %s, 40, 11.20, NVIDIA GB10"
    idle = judge(answer(reading(line % "0"))).gpus[0]
    assert idle.idle and show.row(idle, 0.0)[2] == "-" and freed_words(idle) == "free"
    assert judge(answer(reading(line % "97"))).gpus[0].busy == "utilisation 97 % (idle: 5 %)"
    held = judge(answer(reading(line % "0"), apps=reading("9000, [N/A], GPU-0, x"))).gpus[0]
    assert held.busy == "held by unknown process, pid 9000: x"
    for lost in (line % word, line % "[Unknown Error]", line.replace(word, "[Unknown Error]", 1) % "0"):
        assert not judge(answer(reading(lost))).gpus[0].readable, "a card that tells nothing is not idle"


def test_a_holder_makes_a_gpu_busy_without_a_byte() -> None:
    box = judge(answer(reading(row(0)), apps=reading("9000, 0, GPU-0, x")))
    assert box.gpus[0].busy == "held by unknown process, pid 9000: x"


def test_a_gpu_of_a_run_that_has_not_opened_it_yet_is_reserved() -> None:
    inside = {"runs": [{"tag": "a", "gpus": [{"index": 0, "uuid": "GPU-0"}]}, {"id": "R2", "gpus": None}]}
    box = gpufacts.judge_facts(HOST, answer(reading(row(0), row(1))), inside)
    assert [gpu.busy for gpu in box.gpus] == ["reserved by a", ""]
    assert [gpu.index for gpu in choose(box, parse("1"))] == [1]
    with pytest.raises(GpusBusy, match="GPU 0: reserved by a"):
        choose(box, parse("2"))


def test_a_learnt_level_is_the_gpus_own() -> None:
    inside = {**INSIDE, "baselines": {"GPU-0": {"memory_mib": 400, "learnt_at": 1.0}}}
    box = judge(answer(reading(row(0, "450"), row(1, "450"))), inside)
    assert [gpu.idle for gpu in box.gpus] == [True, False]
    assert limit_mib("GPU-0", IdleRule(), {"GPU-0": "damaged"}) == TOLERANCE_MIB
    assert limit_mib("GPU-0", IdleRule(memory_mib=10), inside["baselines"]) == 10


def test_a_missing_gpu_is_said() -> None:
    assert judge(answer(reading(*(row(index) for index in range(7))))).warnings == (
        "7 of 8 GPUs are visible",
    )
    assert judge(answer(EIGHT)).warnings == ()


ORPHAN = reading(*(row(index, "500" if index == 3 else "0") for index in range(8)))


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("3", Wish(count=3)),
        ("0", Wish()),
        ("none", Wish()),
        ("5,6,7", Wish(names=(5, 6, 7))),
        ("5,", Wish(names=(5,))),
        ("0-2,7", Wish(names=(0, 1, 2, 7))),
        (" 7 , 5 ", Wish(names=(7, 5))),
        ("GPU-3e4f,GPU-1", Wish(names=("GPU-3e4f", "GPU-1"))),
    ],
)
def test_what_gpus_means(text: str, wish: Wish) -> None:
    assert parse(text) == wish


@pytest.mark.parametrize(
    "text", ["", ",", "a", "3-1", "1,1", "0-2,1", "-1", "1.5", "5,,6", "GPU 3", "1;2", "²", "²,3"]
)
def test_what_gpus_cannot_mean(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_the_option_comes_before_the_recipe() -> None:
    assert wish_of(LaunchGpus(count=8), None) == Wish(count=8)
    assert wish_of(LaunchGpus(ids=[5, 6]), None) == Wish(names=(5, 6))
    assert wish_of(LaunchGpus(uuids=["GPU-1"]), None) == Wish(names=("GPU-1",))
    assert wish_of(LaunchGpus(), None).none
    assert wish_of(LaunchGpus(count=8), "2") == Wish(count=2)


def chosen(facts: dict[str, Any], wish: str, **more: Any) -> list[int]:
    return [gpu.index for gpu in choose(judge(facts), parse(wish), **more)]


def test_a_count_takes_the_first_idle_ones() -> None:
    assert chosen(answer(ORPHAN), "4") == [0, 1, 2, 4]
    assert chosen(answer(ORPHAN), "7") == [0, 1, 2, 4, 5, 6, 7]
    with pytest.raises(GpusBusy, match=r"8 wanted, 7 of 8 idle\n  GPU 3: 500 MiB in use") as error:
        chosen(answer(ORPHAN), "8")
    assert error.value.exit_code == 5
    assert "alone" not in error.value.next


def test_a_count_that_may_be_meant_for_a_number_is_told_how_to_write_it() -> None:
    two = answer(reading(*(row(index, "500" if index < 2 else "0") for index in range(8))))
    with pytest.raises(GpusBusy, match="7 wanted, 6 of 8 idle") as error:
        chosen(two, "7")
    assert error.value.next.endswith("or --allow-busy; GPU 7 alone is --gpus 7,")
    assert chosen(two, "7,") == [7]


def test_names_are_taken_in_their_order_or_refused() -> None:
    assert chosen(answer(ORPHAN), "7,5") == [7, 5]
    assert chosen(answer(ORPHAN), "GPU-4,") == [4]
    with pytest.raises(GpusBusy, match=r"GPU 3: 500 MiB.*\n  GPU 9 is missing"):
        chosen(answer(ORPHAN), "2,3,9")
    with pytest.raises(UsageError, match="named twice"):
        chosen(answer(ORPHAN), "4,GPU-4")
    with pytest.raises(GpusBusy) as error:
        chosen(answer(ORPHAN), "7,8,GPU-x")
    assert error.value.what.split("\n  ") == [
        "GPU 8 is missing: this host has GPUs 0-7",
        "GPU GPU-x is missing: this host has 8 GPUs, none with this UUID",
    ]
    assert error.value.next == "choose others with --gpus; dflashctl gpu", "nothing to wait for or to kill"


@pytest.mark.parametrize("allow_busy", [False, True])
def test_more_than_the_host_has_is_nothing_to_wait_for(allow_busy: bool) -> None:
    with pytest.raises(NoSuchGpus) as error:
        chosen(answer(EIGHT), "9", allow_busy=allow_busy)
    assert error.value.what == "9 GPUs wanted, this host has 8 GPUs"
    assert "wait" not in error.value.next and "--gpus" in error.value.next
    with pytest.raises(NoSuchGpus):
        chosen(answer(EIGHT), "8,")


def test_where_no_gpu_can_be_read_the_next_step_leads_on() -> None:
    box = Box((), "there is no nvidia-smi")
    with pytest.raises(GpusBusy) as error:
        choose(box, Wish(count=1))
    assert error.value.next == "dflashctl doctor says why; for a run without GPUs: --gpus none"
    assert not isinstance(error.value, NoSuchGpus), "a driver may come back: that is waited for"


def test_allow_busy_takes_idle_ones_first_and_never_the_unreadable() -> None:
    sick = reading(row(0, "500"), row(1, busy="[GPU requires reset]"), row(2), row(3, "100"))
    assert chosen(answer(sick), "2", allow_busy=True) == [2, 3]
    assert chosen(answer(sick), "3", allow_busy=True) == [0, 2, 3]
    with pytest.raises(GpusBusy):
        chosen(answer(sick), "4", allow_busy=True)
    with pytest.raises(GpusBusy, match="GPU 1: requires reset"):
        chosen(answer(sick), "1,", allow_busy=True)
    assert chosen(answer(sick), "0,", allow_busy=True) == [0]


@pytest.mark.parametrize("option", [None, "none", "1", "0,", "0-0", "GPU-0"])
def test_a_count_of_none_is_said_and_nothing_else(option: str | None) -> None:
    assert surprise("0") == "--gpus 0 is a count: no GPUs; GPU 0 alone is --gpus 0,"
    assert parse("0").none and parse("0,").names == (0,)
    assert surprise(option) == ""


def test_no_wish_needs_no_driver() -> None:
    broken = answer(reading(exit=None, problem="missing"))
    assert chosen(broken, "none") == []
    with pytest.raises(GpusBusy, match="cannot be read: there is no nvidia-smi"):
        chosen(broken, "1", allow_busy=True)


def test_the_table_has_a_row_for_each_gpu() -> None:
    facts = answer(
        reading(row(0, "1634", "97"), row(1, power="[N/A]"), row(2, "[Unknown Error]")),
        apps=reading("9000, 1634, GPU-0, python"),
        processes={"9000": process(9000, 312, CONTAINER_NS)},
        pidns=HOST_NS,
    )
    rows = show.rows(judge(facts), now=1251.0)
    assert rows[0] == [
        "0",
        "NVIDIA H200",
        "1,634 / 143,771 MiB",
        "97 %",
        "30 C",
        "70 W",
        "4m11s",
        "localtls (pid 312)",
    ]
    assert rows[1] == ["1", "NVIDIA H200", "0 / 143,771 MiB", "0 %", "30 C", "-", "-", "idle"]
    assert rows[2][2] == "?" and rows[2][-1] == "memory.used reads [Unknown Error]"


def test_a_hundred_holders_are_counted_not_listed() -> None:
    gpu = judge(
        answer(reading(row(0)), apps=reading(*(f"{9000 + n}, 1, GPU-0, x" for n in range(100))))
    ).gpus[0]
    assert gpu.busy.endswith("pid 9007: x; 92 more")
    assert show.holder_cell(gpu).splitlines()[-2:] == [
        "unknown process, pid 9007: x",
        "92 more: --json names all",
    ]
    assert len(show.gpu_json(gpu)["holders"]) == 100


def test_hostile_names_do_not_reach_the_terminal() -> None:
    facts = answer(reading(row(0)), apps=reading("9000, 0, GPU-0, \x1b[2Jx"))
    assert "\x1b" not in show.rows(judge(facts))[0][-1]


def test_json_has_the_reasons() -> None:
    made = show.as_json(judge(answer(ORPHAN)))
    assert [gpu["idle"] for gpu in made["gpus"]] == [index != 3 for index in range(8)]
    assert made["gpus"][3]["why_not_idle"].startswith("500 MiB")
    assert made["problem"] is None
