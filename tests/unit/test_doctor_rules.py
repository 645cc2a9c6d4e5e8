"""Every line of `doctor` by facts: all well on a healthy box, and what trips each one.

Run: python -m pytest tests/unit/test_doctor_rules.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from doctor_kit import (
    GIB,
    HOST,
    facts,
    folder,
    judged,
    place,
    put,
    query,
    reading,
)
from doctor_table import TABLE
from doctor_table_inside import INIT, OUTSIDE

from dflashctl.doctor.checks import CHECKS, judge
from dflashctl.doctor.document import payload
from dflashctl.render import hints
from dflashctl.views.doctor import print_report, words


@pytest.mark.parametrize(
    ("name", "status", "changes", "words", "how"),
    TABLE,
    ids=[f"{row[0]}-{row[1]}-{n}" for n, row in enumerate(TABLE)],
)
def test_what_trips_a_line(
    name: str, status: str, changes: dict[str, Any], words: str, how: dict[str, Any]
) -> None:
    found = judged(name, changes, **how)
    assert found.status == status, found
    assert words in f"{found.found}\n{found.means}\n{found.mend}", found
    if status in ("warning", "failure"):
        assert found.means and found.mend


def test_a_healthy_box_is_well() -> None:
    report = judge(facts())
    assert [each.name for each in report.lines if each.status != "ok"] == []
    assert [each.name for each in report.lines] == [check.name for check in CHECKS]
    assert report.left_out == ()
    assert all(not each.means and not each.mend for each in report.lines)


def test_every_line_can_be_tripped() -> None:
    tripped = {row[0] for row in TABLE if row[1] in ("warning", "failure")}
    assert tripped == {check.name for check in CHECKS}


def test_the_versions_are_those_of_the_package() -> None:
    import re
    import tomllib
    from pathlib import Path

    from dflashctl.doctor import rules_cuda

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = dict(re.split(">=", each) for each in project["optional-dependencies"]["trainer"])
    for name, least in rules_cuda.LEAST.items():
        assert wanted[name] == ".".join(map(str, least))
    assert project["requires-python"] == ">=" + ".".join(map(str, rules_cuda.PYTHON_LEAST))


def test_what_an_answer_holds_is_never_trusted_to_have_its_type() -> None:
    """A hostile or damaged answer makes lines "not known" or failures, never a crash."""
    strange: list[Any] = [None, "x", -1, [], {"a": [None]}]
    healthy = facts({"box/smi": query(1), "box/topo": reading("")})
    for part in ("box", "inside"):
        sound = getattr(healthy, part)
        for path in paths_of(sound):
            for value in strange:
                report = judge(dataclasses.replace(healthy, **{part: put(sound, path, value)}))
                assert len(report.lines) == len(CHECKS), (part, path, value)


def paths_of(value: Any, above: str = "") -> list[str]:
    """Every place of a nested answer, two of each list."""
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in (f"{above}{k}", *paths_of(v, f"{above}{k}/"))]
    if isinstance(value, list):
        return [p for n, v in enumerate(value[:2]) for p in (f"{above}{n}", *paths_of(v, f"{above}{n}/"))]
    return []


def test_without_contact_everything_else_waits_for_it() -> None:
    reason = "there is no connection: see above"
    lost = {"trouble": "no contact", "what": "nothing listens", "next": "start it"}
    report = judge(
        facts(
            contact=lost,
            box=None,
            inside=None,
            box_problem=reason,
            inside_problem=reason,
            inside_asked=False,
            clocks={},
        )
    )
    assert [each.name for each in report.of("failure")] == ["ssh"]
    assert {each.status for each in report.lines[3:]} == {"not known"}
    assert all(each.found for each in report.lines)


def test_what_nothing_is_known_of_for_one_reason_is_one_line(capsys: Any) -> None:
    """The line that says what is wrong stood among thirty that said: see above."""
    reason = "there is no connection: see above"
    lost = {"trouble": "no contact", "what": "nothing listens", "next": "start it"}
    apart = {"box": None, "inside": None, "box_problem": reason, "inside_problem": reason}
    report = judge(facts(contact=lost, inside_asked=False, clocks={}, **apart))
    print_report("ct200", report, 0.1)
    said = capsys.readouterr().out
    waits = [each.name for each in report.of("not known") if each.found == reason]
    assert len(waits) > 25 and said.count(reason) == 1
    assert f"not known ({reason}): {', '.join(waits)}\n" in said
    assert "container\n" not in said and "connection\n" in said, "no heading without a line"
    assert said.endswith(f"1 failure, {len(report.of('not known'))} not known\n"), said
    print_report("ct200", judge(facts()), 0.1)
    assert "not known (" not in capsys.readouterr().out


def test_a_frozen_container_is_described_from_its_host() -> None:
    how = {"inside": None, "inside_problem": "container 200 is frozen", "inside_asked": False}
    report = judge(
        facts({f"{INIT}/freezer": "frozen 1\n", f"{OUTSIDE}/shm": folder("/dev/shm", size=GIB // 32)}, **how)
    )
    failures = [each.name for each in report.of("failure")]
    assert failures == ["freezer", "/dev/shm"]
    known = {each.name for each in report.lines if each.status == "ok"}
    assert {"users", "mounts", "driver", "device nodes", "NVML", "count", "disk", "inodes", "memory"} <= known
    waits = {each.name: each.found for each in report.of("not known")}
    assert set(waits) == {
        "NVML inside",
        "P2P",
        "CUDA IPC",
        "folders",
        "ulimits",
        "Python",
        "packages",
        "torch",
        "compiler",
    }
    assert "container 200 is frozen" in waits["torch"]


def test_a_folder_of_a_foreign_owner_is_told_from_outside_too() -> None:
    outside = {f"{OUTSIDE}/folders/0": folder("/workspace", uid=1000, writable=None)}
    found = judged("folders", outside, inside=None, inside_problem="frozen")
    assert found.status == "failure" and "chown -R" in found.mend


def test_a_stopped_container_says_why_the_rest_is_not_known() -> None:
    status = {"box/container/status": reading("status: stopped\n"), INIT: None}
    report = judge(facts(status, inside=None, inside_problem="container 200 is stopped", inside_asked=False))
    assert [each.name for each in report.of("failure")] == ["state"]
    waits = {each.name for each in report.of("not known")}
    assert {"freezer", "users", "device nodes", "disk", "torch"} <= waits
    known = {each.name for each in report.of("ok")}
    assert {
        "Proxmox",
        "locks",
        "mounts",
        "nvidia-uvm",
        "cgroup rules",
        "NVML",
        "count",
        "ECC",
        "Xid",
    } <= known


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        (
            {"engine": "ssh", "container": None},
            {"Proxmox", "state", "freezer", "locks", "users", "mounts", "cgroup rules", "NVML inside"},
        ),
        (
            {"engine": "local", "container": None},
            {"ssh key", "known_hosts", "ssh", "clock"}
            | {"Proxmox", "state", "freezer", "locks", "users", "mounts", "cgroup rules", "NVML inside"},
        ),
        (
            {"gpus": HOST.gpus.model_copy(update={"expect": 0})},
            {check.name for check in CHECKS if check.group in ("devices", "GPUs")},
        ),
    ],
)
def test_lines_that_make_no_sense_are_left_out_and_said(change: dict[str, Any], gone: set[str]) -> None:
    report = judge(facts({"box/container": None}, host=change))
    assert {name for name, _ in report.left_out} == gone
    assert all(why for _, why in report.left_out)
    assert {each.name for each in report.lines} == {check.name for check in CHECKS} - gone


def test_the_place_inside_counts_before_the_one_seen_from_outside() -> None:
    changes = {f"{OUTSIDE}/shm": folder("/dev/shm", size=1), "inside/place": place()}
    assert judged("/dev/shm", changes).status == "ok"


def test_commands_name_the_host_that_the_person_named() -> None:
    hints.about("ct200")
    try:
        healthy = facts()
        assert "dflashctl probe -H ct200 p2p measures" in words(judged("P2P"))
        texts = str(payload(healthy.host, judge(healthy), 1.0))
    finally:
        hints.begin()
    assert "dflashctl probe -H ct200 ipc proves" in texts
    assert "dflashctl probe p2p measures" in words(judged("P2P"))
