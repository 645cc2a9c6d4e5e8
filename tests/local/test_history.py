"""Run with: pytest tests/local/test_history.py. The history: many runs, damaged ones, and what was learnt."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from history_kit import SUMMARY, kept_in, made

from dflashctl.agent.history import listing
from dflashctl.agent.records import runfolder
from dflashctl.agent.runs import launch, observe
from dflashctl.cli.main import run
from dflashctl.history.listing import list_runs, show_run
from dflashctl.remote.agent_call import call
from dflashctl.remote.local import LocalEngine
from dflashctl.runs import known
from dflashctl.runs.readfacts import read_answer
from dflashctl.runs.verdict import judge


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    return kept_in(tmp_path / "state")


def test_the_newest_come_first_with_what_was_learnt(engine: LocalEngine) -> None:
    made(
        engine,
        1,
        "bare",
        files={
            "exit.json": {"version": 1, "cause": "exited", "code": 1},
            "root_cause.json": {"version": 1, "error": "ValueError: NaN\nnext: x", "where": "step.py:8"},
        },
    )
    made(engine, 2, "localtls", files={"summary.json": SUMMARY})
    told = list_runs(engine, limit=10)
    assert [(each.facts.tag, each.verdict.state) for each in told.entries] == [
        ("localtls", "finished"),
        ("bare", "failed"),
    ]
    assert told.entries[0].facts.headline == "acceptance length 1.02 -> 2.44"
    assert told.entries[0].code == "7f3a91c2 (git 1c9e4d0, changed)"
    assert (told.entries[0].took_s, told.entries[0].lossless, told.entries[0].best_acceptance_length) == (
        252.0,
        True,
        2.44,
    )
    assert told.entries[1].facts.root_cause == "ValueError: NaN at step.py:8"


def test_a_limit_and_a_tag(engine: LocalEngine) -> None:
    for number in range(6):
        made(engine, number, "even" if number % 2 == 0 else "odd")
    assert [each.facts.tag for each in list_runs(engine, limit=2).entries] == ["odd", "even"]
    assert list_runs(engine, limit=2).total == 6
    assert len(list_runs(engine, limit=10, tag="odd").entries) == 3


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("record.json", '{"version": 1, "tag": "x', "record.json"),
        ("record.json", "", "record.json"),
        ("record.json", None, "no record.json"),
        ("record.json", "[]", "not a JSON object"),
        ("record.json", '{"version": 9}', "version 9, newer"),
        ("exit.json", '{"version": 1,', "exit.json"),
        ("summary.json", b"\xff\xfe".decode("latin-1"), "summary.json"),
    ],
)
def test_a_damaged_file_is_named_and_the_others_are_listed(
    engine: LocalEngine, name: str, content: str | None, problem: str
) -> None:
    made(engine, 1, "good")
    folder = made(engine, 2, "bad", files={name: content})
    told = list_runs(engine, limit=10)
    assert told.entries[1].facts.tag == "good"
    assert told.damaged[0][0] == folder.name
    assert problem in told.damaged[0][1]


def test_a_thousand_runs_are_listed_within_a_second_and_one_round_trip(engine: LocalEngine) -> None:
    """All of them, with a note in each, through the command's own call; a round trip is a call that does
    nothing. What counts is the time of a core, here and there: a machine that is busy with other things adds
    to the clock's, which is only printed."""
    for number in range(1000):
        folder = made(engine, number, f"t{number % 7}", files={"summary.json": SUMMARY})
        events = [{"event": "launched", "record": json.loads((folder / "record.json").read_text())}]
        events += [{"event": "phase", "phase": "training"}] * 12 + [
            {"event": "note", "by": "ann", "text": "x"}
        ]
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with engine:
        trip = _least(lambda: call(engine, "ping", {"echo": 1}, timeout_s=30.0))
        listing = _least(lambda: list_runs(engine, limit=1000))
        entries = list_runs(engine, limit=1000).entries
    assert len(entries) == 1000 and {entry.note for entry in entries} == {"x"}
    print(f"seconds of a core, by the clock: a round trip {trip}, a thousand runs {listing}")
    assert listing[0] < 1.0 + trip[0]


def _least(act: Callable[[], Any]) -> tuple[float, float]:
    """(seconds of a core, children included; seconds by the clock), the least of five."""
    found = []
    for _ in range(5):
        before = sum(os.times()[:4]), time.perf_counter()
        act()
        found.append((round(sum(os.times()[:4]) - before[0], 3), round(time.perf_counter() - before[1], 3)))
    return min(found)


def test_show_by_tag_by_id_and_by_its_end(engine: LocalEngine) -> None:
    first = made(engine, 1, "x")
    second = made(engine, 2, "x")
    assert show_run(engine, "x").entry.facts.id == second.name
    assert show_run(engine, None).entry.facts.id == second.name
    assert show_run(engine, first.name).entry.facts.id == first.name
    assert show_run(engine, first.name[-6:]).entry.facts.id == first.name


def test_a_live_run_is_in_the_list_with_its_step(box: Any, until: Callable[..., Any]) -> None:
    answer = box.python("import time; print('up', flush=True); time.sleep(600)", "live")
    until(lambda: "up" in box.log(answer))
    now = time.monotonic()
    beat = {
        "version": 1,
        "phase": "training",
        "step": 7,
        "wall": time.time(),
        "mono": now,
        "phase_since": now - 1,
    }
    Path(box.run(answer).file("heartbeat.json")).write_text(json.dumps(beat))
    facts = listing.list_runs({"state_dir": box.state_dir}, None)["runs"][0]
    assert facts["heartbeat"]["step"] == 7
    assert facts["family"]["count"] == 1
    assert Path(facts["log"]["path"]).name == "train_live.log"


def test_a_live_run_without_a_heartbeat_has_the_state_that_status_gives_it(
    box: Any, until: Callable[..., Any]
) -> None:
    """A list that did not read the log called a run "running" that had made no step for minutes."""
    stuck = "import time\nfor n in range(1, 9): print('step', n, flush=True)\ntime.sleep(600)"
    computes = "import time\nprint('step 1', flush=True)\nwhile True: pass"
    quick = {"alone_factor": 2, "alone_min_s": 0.5, "slow_min_s": 0.3, "slow_factor": 1}
    for tag, program in (("stuck", stuck), ("computes", computes)):
        request = box.request([sys.executable, "-c", program], tag)
        request["record"]["observe"] = {"step_regex": r"step (?P<step>\d+)", "rules": quick}
        launch.launch(request, box.events.append)
    request = {"state_dir": box.state_dir, "sample_s": 0.4, "known": known.patterns()}

    def by_status() -> dict[str, Any]:
        return {facts.tag: judge(facts) for facts in read_answer(observe.observe(request, None))}

    until(lambda: by_status()["stuck"].state == "wedged")
    asked = listing.list_runs(request, None)
    listed = {facts.tag: judge(facts) for facts in read_answer(asked)}
    assert listed["stuck"].state == "wedged" and "step 8" in listed["stuck"].evidence
    assert any("of a core busy" in each for each in listed["computes"].evidence), listed
    assert {tag: each.state for tag, each in listed.items()} == {
        tag: each.state for tag, each in by_status().items()
    }
    shown = listing.list_runs({**request, "one": True, "tag": "stuck"}, None)
    assert judge(read_answer(shown)[0]).state == "wedged"


def test_as_a_person_types_it(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    hosts = tmp_path / "hosts.yaml"
    state = engine.host.state_dir
    hosts.write_text(
        f"version: 1\nhosts:\n  here: {{engine: local, python: {sys.executable}, state_dir: {state}}}\n"
    )
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))
    monkeypatch.delenv("COLUMNS", raising=False)
    made(engine, 1, "localtls", files={"summary.json": SUMMARY})
    made(engine, 2, "broken", files={"record.json": "{"})
    assert run(["runs"]) == 0
    out = capfd.readouterr().out
    assert out.splitlines()[0] == "here · 2 runs"
    row = next(line for line in out.splitlines() if line.startswith("localtls"))
    assert row.endswith(
        "  4m12s  2.44  7f3a91c2 (git 1c9e4d0, changed)  000001  acceptance length 1.02 -> 2.44"
    )
    assert row.split()[:3] == ["localtls", "finished", "0"]
    assert "4m12s" in row
    assert f"damaged: {runfolder.list_runs(state)[0].id}" in out

    assert run(["runs", "show", "localtls"]) == 0
    out = capfd.readouterr().out
    for piece in (
        "acceptance length 1.02 -> 2.44",
        "lossless: yes",
        "python -m x",
        "ann@laptop",
        "exit code 0",
    ):
        assert piece in out
    assert [line.split() for line in out.splitlines() if line.startswith("greedy")] == [
        ["greedy", "1.02", "2.44"]
    ]
    assert "note: prompt lookup wins at \\x1b[31m4 tokens" in out

    for filters, words in (
        (["--tag", "localtls"], "2 runs, 1 of tag localtls"),
        (["--tag", "nosuch", "--state", "failed"], "2 runs, none of tag nosuch in state failed"),
        (["-n", "1"], "2 runs, the newest 1"),
    ):
        assert run(["runs", *filters]) == 0
        assert capfd.readouterr().out.splitlines()[0] == f"here · {words}"

    assert run(["runs", "list", "--json", "-n", "1"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["schema"], document["total"], len(document["runs"])) == ("dflashctl.runs/1", 2, 1)
    assert run(["runs", "show", "localtls", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["schema"] == "dflashctl.run/1"
    assert document["summary"]["table"]["rows"][0] == ["greedy", "1.02", "2.44"]
