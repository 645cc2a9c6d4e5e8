"""Run with: pytest tests/unit/test_gpus.py. nvidia-smi's answers, who holds what, what is idle."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent import hostfacts, insidefacts, proc
from dflashctl.config.hosts import Host, IdleRule
from dflashctl.config.recipe import LaunchGpus
from dflashctl.errors import GpusBusy, Unreachable, UsageError
from dflashctl.gpus import facts as gpufacts
from dflashctl.gpus import show, smi
from dflashctl.gpus.choose import Wish, choose, parse, wish_of
from dflashctl.gpus.holders import Holder, holders
from dflashctl.gpus.idle import TOLERANCE_MIB, Box, judge_box, limit_mib
from dflashctl.gpus.smi import App, GpuReading

HOST = Host(
    name="ct200",
    engine="local",
    python=sys.executable,
    code_root="/c",
    workdir="/w",
    log_dir="/w",
    state_dir="/s",
)


def row(index: int, used: str = "0", busy: str = "0", temperature: str = "30", power: str = "70.12") -> str:
    return f"{index}, GPU-{index}, {used}, 143771, {busy}, {temperature}, {power}, NVIDIA H200"


def reading(
    *lines: str, exit: int | None = 0, problem: str | None = None, stderr: str = ""
) -> dict[str, Any]:
    return {
        "exit": exit,
        "stdout": "".join(f"{line}\n" for line in lines),
        "stderr": stderr,
        "problem": problem,
    }


def answer(*samples: dict[str, Any], apps: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"samples": list(samples), "apps": apps or reading(), "processes": {}, "pidns": 1, **more}


EIGHT = reading(*(row(index) for index in range(8)))

# --- nvidia-smi


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
    lines = ("589, 1634, GPU-0, python3", "590, [N/A], GPU-1, /opt/my app, with comma", "bad, 1, GPU-0, x")
    apps, problem = smi.parse_apps(reading(*lines))
    assert problem is None
    assert apps == (App(589, "GPU-0", 1634, "python3"), App(590, "GPU-1", None, "/opt/my app, with comma"))


def test_unknown_users_are_not_no_users() -> None:
    read = smi.read(answer(EIGHT, apps=reading("Failed to initialize NVML: Unknown Error", exit=255)))
    assert read.problem is None and read.apps_problem is not None
    box = judge(answer(EIGHT, apps=reading("Failed to initialize NVML: Unknown Error", exit=255)))
    assert not any(gpu.idle for gpu in box.gpus)


# --- holders

CONTAINER_NS, HOST_NS, OTHER_NS, NESTED_NS = 4026532200, 4026531836, 4026532300, 4026532400


def process(
    pid: int, inner: int, pidns: int | None, *, start: int = 50, cgroup: str = "0::/\n"
) -> dict[str, Any]:
    return {
        "pid": pid,
        "start": start,
        "started_at": 1000.0,
        "state": "S",
        "nspid": [pid, inner] if inner != pid else [pid],
        "pidns": pidns,
        "cgroup": cgroup,
        "uid": 100000,
        "user": "100000",
        "comm": "python",
        "cmdline": ["python", "train.py"],
    }


INSIDE: dict[str, Any] = {
    "pidns": CONTAINER_NS,
    "baselines": {},
    "runs": [
        {
            "id": "R1",
            "tag": "localtls",
            "family": [
                {"pid": 312, "start": 50, "nspid": 312, "pidns": CONTAINER_NS, "state": "S"},
                {"pid": 400, "start": 50, "nspid": 7, "pidns": NESTED_NS, "state": "S"},
            ],
        }
    ],
}


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


# --- idle


def judge(facts: dict[str, Any], inside: dict[str, Any] = INSIDE, **rule: Any) -> Box:
    read = smi.read(facts)
    named = holders(read.apps, facts, inside, container=200)
    return judge_box(read, named, rule=IdleRule(**rule), baselines=inside.get("baselines") or {}, expect=8)


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


# --- choice

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


def test_names_are_taken_in_their_order_or_refused() -> None:
    assert chosen(answer(ORPHAN), "7,5") == [7, 5]
    assert chosen(answer(ORPHAN), "GPU-4,") == [4]
    with pytest.raises(GpusBusy, match=r"GPU 3: 500 MiB.*\n  GPU 9 is missing"):
        chosen(answer(ORPHAN), "2,3,9")
    with pytest.raises(UsageError, match="named twice"):
        chosen(answer(ORPHAN), "4,GPU-4")


def test_allow_busy_takes_idle_ones_first_and_never_the_unreadable() -> None:
    sick = reading(row(0, "500"), row(1, busy="[GPU requires reset]"), row(2), row(3, "100"))
    assert chosen(answer(sick), "2", allow_busy=True) == [2, 3]
    assert chosen(answer(sick), "3", allow_busy=True) == [0, 2, 3]
    with pytest.raises(GpusBusy):
        chosen(answer(sick), "4", allow_busy=True)
    with pytest.raises(GpusBusy, match="GPU 1: requires reset"):
        chosen(answer(sick), "1,", allow_busy=True)
    assert chosen(answer(sick), "0,", allow_busy=True) == [0]


def test_no_wish_needs_no_driver() -> None:
    broken = answer(reading(exit=None, problem="missing"))
    assert chosen(broken, "none") == []
    with pytest.raises(GpusBusy, match="cannot be read: there is no nvidia-smi"):
        chosen(broken, "1", allow_busy=True)


# --- what is shown


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


def test_hostile_names_do_not_reach_the_terminal() -> None:
    facts = answer(reading(row(0)), apps=reading("9000, 0, GPU-0, \x1b[2Jx"))
    assert "\x1b" not in show.rows(judge(facts))[0][-1]


def test_json_has_the_reasons() -> None:
    made = show.as_json(judge(answer(ORPHAN)))
    assert [gpu["idle"] for gpu in made["gpus"]] == [index != 3 for index in range(8)]
    assert made["gpus"][3]["why_not_idle"].startswith("500 MiB")
    assert made["problem"] is None


# --- the operations, with a program in nvidia-smi's place


@pytest.fixture
def smi_program(tmp_path: Path) -> Any:
    def make(body: str) -> str:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return str(program)

    return make


def test_host_facts_look_every_process_up(smi_program: Any) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        program = smi_program(
            f'case "$1" in *apps*) echo "{sleeper.pid}, 10, GPU-0, sleep"; echo "99999999, 1, GPU-0, x";; '
            f'*) echo "{row(0)}";; esac'
        )
        facts = hostfacts.host_facts({"nvidia_smi": program, "samples": 3, "interval_s": 0}, None)
        assert len(facts["samples"]) == 3
        assert facts["processes"]["99999999"] is None
        told = facts["processes"][str(sleeper.pid)]
        assert told["cmdline"] == ["sleep", "60"]
        assert told["pidns"] == facts["pidns"] == proc.pid_namespace()
        assert told["start"] == proc.table()[sleeper.pid].start
        assert told["nspid"][-1] == sleeper.pid
        assert abs(told["started_at"] - time.time()) < 30
        box = gpufacts.judge_facts(HOST, facts, {"runs": [], "pidns": facts["pidns"]})
        assert [holder.kind for holder in box.gpus[0].holders] == ["host", "unknown"]
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_hanging_driver_is_left_behind_at_its_deadline(smi_program: Any) -> None:
    program = smi_program("trap '' TERM; exec sleep 60")
    began = time.monotonic()
    facts = hostfacts.host_facts({"nvidia_smi": program, "samples": 3, "smi_timeout_s": 0.3}, None)
    assert time.monotonic() - began < 5
    assert [sample["problem"] for sample in facts["samples"]] == ["timeout"]
    assert "does not answer" in str(smi.read(facts).problem)


def test_no_nvidia_smi_is_missing(tmp_path: Path) -> None:
    facts = hostfacts.host_facts({"nvidia_smi": str(tmp_path / "nothing")}, None)
    assert smi.read(facts).problem == "there is no nvidia-smi"
    (tmp_path / "plain").write_text("x")
    facts = hostfacts.host_facts({"nvidia_smi": str(tmp_path / "plain")}, None)
    assert "cannot be run" in str(smi.read(facts).problem)


def test_inside_facts_name_runs_that_are_not_over(box: Any) -> None:
    ended = box.launch(["true"], "old")
    box.wait(ended)
    live = box.launch(["sleep", "60"], gpus=[{"index": 1, "uuid": "GPU-1"}])
    lost = box.launch(["sleep", "60"], "lost")
    gone = box.run(lost).identities()[0]
    os.kill(gone[0], signal.SIGKILL)  # our own child of a moment ago
    while box.run(lost).live():
        time.sleep(0.01)
    facts = insidefacts.inside_facts({"state_dir": box.state_dir, "code_root": None}, None)
    runs = {run["tag"]: run for run in facts["runs"]}
    assert set(runs) == {"t", "lost"}
    assert (runs["t"]["live"], runs["lost"]["live"]) == (True, False)
    assert runs["t"]["leader"] == live["leader"] and runs["t"]["gpus"] == [{"index": 1, "uuid": "GPU-1"}]
    member = next(one for one in runs["t"]["family"] if one["pid"] == live["leader"]["pid"])
    assert member["pidns"] == facts["pidns"] == proc.pid_namespace()
    assert member["start"] == live["leader"]["start"]
    assert facts["release"] is None


def test_idle_levels_are_learnt_on_demand_and_kept(tmp_path: Path) -> None:
    state_dir = str(tmp_path / "state")
    assert insidefacts.baselines(state_dir) == {}
    insidefacts.learn_idle({"state_dir": state_dir, "gpus": {"GPU-0": 12, "GPU-1": 3}}, None)
    insidefacts.learn_idle({"state_dir": state_dir, "gpus": {"GPU-1": 5}}, None)
    levels = {uuid: level["memory_mib"] for uuid, level in insidefacts.baselines(state_dir).items()}
    assert levels == {"GPU-0": 12, "GPU-1": 5}
    (tmp_path / "state" / insidefacts.BASELINES).write_text("{")
    assert insidefacts.baselines(state_dir) == {}


class Fake:
    """An engine's host, with canned answers for the two calls."""

    host = HOST

    def __init__(self, outside: dict[str, Any] | Exception) -> None:
        self.outside = outside

    def call(self, engine: Any, op: str, request: Any, *, where: str = "inside", timeout_s: float) -> Any:
        if op == "inside_facts":
            return INSIDE
        assert where == "host" and op == "host_facts"
        if isinstance(self.outside, Exception):
            raise self.outside
        return self.outside


def test_both_sides_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(answer(EIGHT))
    monkeypatch.setattr(gpufacts, "call", fake.call)
    facts = gpufacts.read_facts(fake, samples=3)  # type: ignore[arg-type]
    assert len(facts.box.gpus) == 8 and facts.inside is INSIDE


def test_a_host_that_cannot_be_asked_leaves_gpus_unknown_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(Unreachable("python3 is not on the host"))
    monkeypatch.setattr(gpufacts, "call", fake.call)
    box = gpufacts.read_facts(fake).box  # type: ignore[arg-type]
    assert box.gpus == () and "python3 is not on the host" in str(box.problem)


def test_a_bug_in_the_thread_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(KeyError("oops"))
    monkeypatch.setattr(gpufacts, "call", fake.call)
    with pytest.raises(KeyError, match="oops"):
        gpufacts.read_facts(fake)  # type: ignore[arg-type]
