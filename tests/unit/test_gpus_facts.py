"""Run with: pytest tests/unit/test_gpus_facts.py. The operations on both sides, and both together."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import (
    EIGHT,
    HOST,
    INSIDE,
    answer,
    mig_row,
    row,
)

from dflashctl.agent import AgentError
from dflashctl.agent.gpus import gpudesk, hostfacts, insidefacts, reservations
from dflashctl.agent.processes import proc
from dflashctl.agent.records import pick, runfolder
from dflashctl.errors import Unreachable
from dflashctl.gpus import facts as gpufacts
from dflashctl.gpus import smi


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
            f'*) echo "{mig_row(0, "Disabled")}";; esac'
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


def test_a_hanging_driver_is_left_behind_at_its_deadline_and_waited_for_once(
    smi_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = smi_program("trap '' TERM; exec sleep 60")
    waits: list[float] = []
    end = hostfacts.end
    monkeypatch.setattr(hostfacts, "end", lambda started, s: waits.append(s) or end(started, s))
    facts = hostfacts.host_facts({"nvidia_smi": program, "samples": 3, "smi_timeout_s": 1.5}, None)
    assert waits == [1.5, hostfacts.REAP_S]
    assert [sample["problem"] for sample in facts["samples"]] == ["timeout"]
    assert "does not answer" in str(smi.read(facts).problem)


@pytest.mark.parametrize(("mode", "mig"), [("Enabled", True), ("Disabled", False), ("[N/A]", None)])
def test_mig_mode_is_asked_for_and_a_driver_that_does_not_know_it_answers_all_the_same(
    smi_program: Any, tmp_path: Path, mode: str, mig: bool | None
) -> None:
    asked = tmp_path / "asked"
    log = f'case "$1" in *apps*) exit;; esac; echo "$1" >> {asked}'
    facts = hostfacts.host_facts(
        {"nvidia_smi": smi_program(f'{log}; echo "{mig_row(0, mode)}"'), "samples": 2, "interval_s": 0}, None
    )
    assert [gpu.mig for gpu in smi.read(facts).gpus] == [mig]
    assert len(asked.read_text().splitlines()) == 2
    asked.unlink()
    said = 'Field \\"mig.mode.current\\" is not a valid field to query.'
    refusal = f'case "$1" in *mig*) echo "{said}"; exit 2;; esac'
    old = smi_program(f'{log}; {refusal}; echo "{row(0)}"')
    facts = hostfacts.host_facts({"nvidia_smi": old, "samples": 3, "interval_s": 0}, None)
    read = smi.read(facts)
    assert read.problem is None and [(gpu.index, gpu.mig, gpu.name) for gpu in read.gpus] == [
        (0, None, "NVIDIA H200")
    ]
    assert len(asked.read_text().splitlines()) == 4, "asked for once"


def test_no_nvidia_smi_is_missing(tmp_path: Path) -> None:
    facts = hostfacts.host_facts({"nvidia_smi": str(tmp_path / "nothing")}, None)
    assert smi.read(facts).problem == "there is no nvidia-smi"
    (tmp_path / "plain").write_text("x")
    facts = hostfacts.host_facts({"nvidia_smi": str(tmp_path / "plain")}, None)
    assert "cannot be run" in str(smi.read(facts).problem)


def test_inside_facts_name_runs_that_are_not_over(box: Any, until: Any) -> None:
    ended = box.launch(["true"], "old")
    box.wait(ended)
    live = box.launch(["sleep", "60"], gpus=[{"index": 1, "uuid": "GPU-1"}])
    lost = box.launch(["sleep", "60"], "lost")
    gone = box.run(lost).identities()[0]
    os.kill(gone[0], signal.SIGKILL)  # our own child of a moment ago
    until(lambda: not box.run(lost).live())
    facts = insidefacts.inside_facts({"state_dir": box.state_dir, "code_root": None}, None)
    runs = {run["tag"]: run for run in facts["runs"]}
    assert set(runs) == {"t", "lost"}
    assert (runs["t"]["live"], runs["lost"]["live"]) == (True, False)
    assert runs["t"]["leader"] == live["leader"] and runs["t"]["gpus"] == [{"index": 1, "uuid": "GPU-1"}]
    member = next(one for one in runs["t"]["family"] if one["pid"] == live["leader"]["pid"])
    assert member["pidns"] == facts["pidns"] == proc.pid_namespace()
    assert member["start"] == live["leader"]["start"]
    assert facts["release"] is None


def test_the_place_names_the_next_run_behind_all_of_its_runs(box: Any) -> None:
    """Laptops' clocks differ; one that is ahead must not make its ended run the newest of a tag for hours."""
    request = {"state_dir": box.state_dir, "code_root": None}
    assert insidefacts.inside_facts(request, None)["next_id"] > runfolder.new_id(time.time() - 60)
    ended = box.launch(["true"], id=runfolder.new_id(time.time() + 7200))
    box.wait(ended)
    following = insidefacts.inside_facts(request, None)["next_id"]
    live = box.launch(["sleep", "60"], id=following)
    assert pick.one_run({"state_dir": box.state_dir, "tag": "t"}).id == live["id"] == following


def test_idle_levels_are_learnt_on_demand_and_kept(tmp_path: Path) -> None:
    state_dir = str(tmp_path / "state")
    assert insidefacts.baselines(state_dir) == {}
    insidefacts.learn_idle({"state_dir": state_dir, "gpus": {"GPU-0": 12, "GPU-1": 3}}, None)
    insidefacts.learn_idle({"state_dir": state_dir, "gpus": {"GPU-1": 5}}, None)
    levels = {uuid: level["memory_mib"] for uuid, level in insidefacts.baselines(state_dir).items()}
    assert levels == {"GPU-0": 12, "GPU-1": 5}
    (tmp_path / "state" / insidefacts.BASELINES).write_text("{")
    assert insidefacts.baselines(state_dir) == {}


def test_what_a_newer_dflashctl_has_learnt_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / insidefacts.BASELINES
    request = {"state_dir": str(tmp_path), "gpus": {"GPU-0": 12}}
    for version, kept in ((2, True), (1, False)):
        file.write_text(json.dumps({"version": version, "gpus": {}, "later": 1}))
        if kept:
            with pytest.raises(AgentError, match="newer dflashctl") as error:
                insidefacts.learn_idle(request, None)
            assert (error.value.kind, error.value.where) == ("locked", str(file))
        else:
            insidefacts.learn_idle(request, None)
        assert json.loads(file.read_text())["later"] == 1, "what is not known is kept"


def test_gpus_that_a_newer_dflashctl_gave_away_are_given_to_nobody(
    tmp_path: Path, smi_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reservations read as none, and the next launch wrote its own over them."""
    for module in (gpudesk, reservations):
        monkeypatch.setattr(module, "path_of", lambda name: str(tmp_path / name))
    file = tmp_path / reservations.FILE
    file.write_text(json.dumps({"version": 2, "reservations": []}))
    request = {"nvidia_smi": smi_program(f'case "$1" in *gpu=*) echo "{mig_row(0, "Disabled")}";; esac')}
    with pytest.raises(AgentError, match="newer dflashctl") as error:
        gpudesk.gpu_desk(request, lambda event: None)
    assert (error.value.kind, error.value.where) == ("locked", str(file))
    facts = hostfacts.host_facts(request, None)
    box = gpufacts.judge_facts(HOST, facts, INSIDE)
    assert any(str(file) in warning and "given away" in warning for warning in box.warnings)
    assert json.loads(file.read_text())["version"] == 2


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
