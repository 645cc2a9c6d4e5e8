"""Run with: pytest tests/unit/test_observe_runs.py. Facts about real processes and real run folders."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent import AgentError
from dflashctl.agent.processes.signals import send_signal
from dflashctl.agent.records import runfolder
from dflashctl.agent.runs import observe, runfacts
from dflashctl.runs import known
from dflashctl.runs.facts import RunFacts
from dflashctl.runs.readfacts import read_answer, read_heartbeat, read_run, read_steps
from dflashctl.runs.verdict import judge

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
SPIN = "print('up', flush=True)\nwhile True: pass"


def ask(box: Any, **request: Any) -> list[RunFacts]:
    answer = observe.observe(
        {"state_dir": box.state_dir, "sample_s": 0.3, "known": known.patterns(), **request}, None
    )
    json.dumps(answer)  # what travels
    return read_answer(answer)


def beat(run: runfolder.RunFolder, **changes: Any) -> None:
    now = time.monotonic()
    body = {
        "version": 1, "pid": 1, "phase": "training", "step": 118, "total_steps": 600, "wall": time.time(),
        "mono": now, "phase_since": now - 100, "deadline_s": 30, "median_step_s": 3.6,
        "queues": {"hidden": {"depth": 8, "size": 8}}, "threads": {"drafter-0": False, "target-0": True},
        "metrics": {"loss": 2.5},
    }  # fmt: skip
    Path(run.file("heartbeat.json")).write_text(json.dumps(body | changes))


def test_a_sleeping_process_shows_no_cpu_time_and_a_spinning_one_does(
    box: Any, until: Callable[..., Any]
) -> None:
    sleeper, spinner = box.python(SLEEP, "sleeper"), box.python(SPIN, "spinner")
    until(lambda: "up" in box.log(sleeper) and "up" in box.log(spinner))
    found = {facts.tag: facts for facts in ask(box, sample_s=1.0)}
    assert found["sleeper"].family.count == 1
    assert found["sleeper"].family.cpu_s <= 0.02
    assert found["spinner"].family.cpu_s > 0.1
    assert found["sleeper"].family.processes[0].state == "S"
    assert found["sleeper"].family.processes[0].rss_bytes > 2**20
    assert found["sleeper"].supervisor_alive and found["sleeper"].leader_alive
    assert 1.0 <= found["sleeper"].sample_s < 60
    assert judge(found["spinner"]).state == "running"


def test_a_run_with_a_heartbeat_dead_threads_and_a_known_exception_is_wedged(
    box: Any, until: Callable[..., Any]
) -> None:
    text = "    assert torch._C._is_key_in_tls(attr_name)\nAssertionError"
    answer = box.python(
        f"import time; print('Traceback (most recent call last):'); print({text!r}, flush=True)\n" + SLEEP
    )
    until(lambda: "up" in box.log(answer))
    run = box.run(answer)
    beat(run)
    old = time.time() - 251
    Path(run.file("metrics.jsonl")).write_text(
        "".join(json.dumps({"step": 100 + n, "wall": old - (18 - n) * 3.6}) + "\n" for n in range(19))
        + '{"step": 1'
    )
    (facts,) = ask(box)
    assert facts.steps is not None and facts.steps.median_step_s == pytest.approx(3.6)
    assert facts.steps.last_step == 118
    verdict = judge(facts)
    assert (verdict.state, verdict.confidence) == ("wedged", "high")
    told = "; ".join(verdict.evidence)
    assert "1 drafter thread gone" in told
    assert "AssertionError … assert torch._C._is_key_in_tls(attr_name) (known: dflashctl explain t)" in told


def test_a_stopped_process_is_named(box: Any, until: Callable[..., Any]) -> None:
    answer = box.python(SLEEP)
    until(lambda: "up" in box.log(answer))
    (leader,) = box.family(answer)
    send_signal(leader.identity, signal.SIGSTOP)
    until(lambda: box.family(answer)[0].state == "T")
    verdict = judge(ask(box)[0])
    assert (verdict.state, verdict.confidence) == ("wedged", "high")


def test_a_killed_supervisor_makes_the_run_lost_and_its_orphans_are_counted(
    box: Any, until: Callable[..., Any]
) -> None:
    answer = box.python(SLEEP)
    until(lambda: "up" in box.log(answer))
    run = box.run(answer)
    (leader,) = box.family(answer)
    supervisor, _ = run.identities()
    send_signal(supervisor, signal.SIGKILL)
    until(lambda: not run.live())
    verdict = judge(ask(box)[0])
    assert verdict.state == "lost"
    assert "1 process of it still live" in verdict.evidence[0]
    assert verdict.next == ("dflashctl kill t",)
    send_signal(leader.identity, signal.SIGKILL)
    until(lambda: not box.family(answer))
    assert "gone without an exit record" in judge(ask(box)[0]).evidence[0]


def test_a_folder_of_another_boot_is_lost_and_never_names_a_process_of_today(
    box: Any, until: Callable[..., Any]
) -> None:
    answer = box.python(SLEEP)
    until(lambda: "up" in box.log(answer))
    run = box.run(answer)
    for name in ("supervisor.json", "record.json"):
        body = json.loads(Path(run.file(name)).read_text())
        kept = dict(body)
        body["boot_id"] = "another"
        run.write(name, body)
        if name == "supervisor.json":
            supervisor = kept
    verdict = judge(ask(box)[0])
    run.write("supervisor.json", supervisor)  # the fixture ends it by this
    assert verdict.state == "lost"
    assert "the container was restarted" in verdict.evidence[0]


def test_by_default_live_runs_and_the_newest_ended_one_of_each_tag_are_shown(
    box: Any, until: Callable[..., Any]
) -> None:
    for _ in range(2):
        box.wait(box.python("pass", "twice"))
    box.wait(box.python("raise SystemExit(3)", "bad"))
    live = box.python(SLEEP, "live")
    until(lambda: "up" in box.log(live))
    old = box.python("pass", "old")
    box.wait(old)
    for path in Path(box.run(old).path).iterdir():
        os.utime(path, (0, 0))
    assert [facts.tag for facts in ask(box)] == ["live", "bad", "twice"]
    answer = observe.observe({"state_dir": box.state_dir, "limit": 1, "sample_s": 0}, None)
    assert [run["record"]["tag"] for run in answer["runs"]] == ["live", "bad"]
    assert answer["hidden"] == 1
    assert [facts.tag for facts in ask(box, tag="old")] == ["old"]


def test_an_old_live_run_is_always_shown(box: Any, until: Callable[..., Any]) -> None:
    live = box.python(SLEEP, "live")
    until(lambda: "up" in box.log(live))
    assert [facts.tag for facts in ask(box, recent_s=-1000.0)] == ["live"]


def test_an_unknown_tag_names_the_newest_ones(box: Any) -> None:
    box.wait(box.python("pass", "localtls"))
    with pytest.raises(
        AgentError, match="no run has the tag 'localtsl'; the newest tags are localtls"
    ) as caught:
        ask(box, tag="localtsl")
    assert caught.value.kind == "not_found"


def test_a_run_is_found_by_the_end_of_its_id(box: Any) -> None:
    answer = box.python("pass", "x")
    box.wait(answer)
    assert ask(box, id=answer["id"][-6:])[0].id == answer["id"]


def test_a_damaged_record_is_named_and_hides_no_other_run(box: Any) -> None:
    box.wait(box.python("pass", "good"))
    damaged = box.python("pass", "damaged")
    box.wait(damaged)
    Path(box.run(damaged).file("record.json")).write_text('{"version": 1, "tag')
    found = ask(box)
    assert [facts.tag for facts in found] == ["", "good"]
    verdict = judge(found[0])
    assert verdict.state == "unknown"
    assert "record.json" in verdict.evidence[1]


def test_a_file_of_a_newer_version_is_named(box: Any, until: Callable[..., Any]) -> None:
    answer = box.python(SLEEP)
    until(lambda: "up" in box.log(answer))
    beat(box.run(answer), version=7)
    (facts,) = ask(box)
    assert facts.heartbeat is None
    assert "version 7, newer" in facts.problems[0]
    assert any("version 7" in said for said in judge(facts).evidence)


def test_nothing_was_ever_launched(box: Any) -> None:
    assert ask(box) == []
    with pytest.raises(AgentError, match="no run has been launched yet"):
        ask(box, tag="x")


def test_step_times_are_medians_over_reports_of_several_steps() -> None:
    entries = [{"step": 10 * n, "wall": 1000.0 + 20 * n} for n in range(12)]
    entries.insert(5, {"event": "no step"})
    entries[-1]["wall"] += 500  # one long pause moves no median
    facts = runfacts.metrics_facts(entries)
    assert facts is not None
    assert (facts["median_step_s"], facts["gap_s"], facts["recent_step_s"]) == (2.0, 20.0, 2.0)
    assert runfacts.metrics_facts([]) is None
    assert runfacts.metrics_facts([{"step": True, "wall": 1}, {"step": "9", "wall": 1}]) is None


def test_only_the_end_of_a_long_history_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "wall": float(n)}) + "\n" for n in range(50_000)))
    entries = runfacts.tail_entries(str(path))
    assert entries[-1]["step"] == 49_999
    assert 5_000 < len(entries) < 20_000


def test_a_wall_clock_that_was_set_makes_no_false_pause() -> None:
    """The report and the heartbeat of one moment; then the wall clock jumps an hour ahead."""
    now = {"wall": 1000.0 + 3600 + 2, "mono": 52.0}
    steps = read_steps({"last": {"step": 5, "wall": 1000.0}}, {"wall": 1001.0, "mono": 51.0}, now)
    assert steps is not None
    assert steps.age_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    "beat",
    [{}, {"phase": 3, "mono": 1}, {"phase": "x"}, {"phase": "x", "mono": "1"}, {"phase": "x", "mono": True}],
)
def test_a_heartbeat_without_phase_or_time_says_nothing(beat: dict[str, Any]) -> None:
    assert read_heartbeat(beat, {"mono": 5.0}) is None


def test_a_loss_that_is_no_number_is_named() -> None:
    read = read_heartbeat(
        {"phase": "training", "mono": 1.0, "metrics": {"loss": float("nan"), "lr": 0.1}}, {"mono": 2.0}
    )
    assert read is not None
    assert (read.not_finite, dict(read.metrics)) == (("loss",), {"lr": 0.1})


def test_wrong_types_anywhere_are_as_good_as_absent() -> None:
    hostile: dict[str, Any] = {
        "id": 7, "record": {"tag": ["x"], "gpus": "all", "observe": 3, "created_at": "now"}, "exit": [1],
        "heartbeat": {"phase": "x", "mono": 1.0, "queues": {"a": 3}, "threads": 5, "metrics": {"loss": "x"}},
        "metrics": {"last": 3}, "log": {"known": {"no-such": {}}, "exceptions": "6", "first_exception": "x"},
        "family": {"states": [], "processes": [1, {"pid": "x"}]}, "events": [], "summary": 1,
        "root_cause": "x", "supervisor_recorded": 1, "problems": [3],
    }  # fmt: skip
    facts = read_run(hostile, {"wall": 10.0, "mono": 2.0})
    assert facts.log is not None and facts.log.known == ()
    assert facts.heartbeat is not None and facts.heartbeat.metrics == {}
    assert judge(facts).state
