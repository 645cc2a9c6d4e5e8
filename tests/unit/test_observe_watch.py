"""Run with: pytest tests/unit/test_observe_watch.py. A watch survives lost contact, and what it remembers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflashctl.config.hosts import Host, Ssh
from dflashctl.errors import ContainerDown, DflashError, Unreachable
from dflashctl.gpus import smi
from dflashctl.render.table import plain
from dflashctl.runs import lastseen, stopping
from dflashctl.runs.status import Look, Memory, judged
from dflashctl.runs.watch import watch
from dflashctl.views import status as view

HOST = Host(
    name="here",
    engine="local",
    python=sys.executable,
    code_root="/c",
    workdir="/w",
    log_dir="/w",
    state_dir="/s",
)
GPUS = smi.SmiReading(
    tuple(smi.GpuReading(n, f"GPU-{n}", "H200", 60000, 143771, 97, 40, 300.0) for n in range(8))
)


def answer(mono: float, step: int, **run: Any) -> dict[str, Any]:
    """What the agent says of one live run, at this monotonic time."""
    facts = {
        "id": "20261130T120000000-abcdef",
        "record": {
            "tag": "demo", "created_at": 0.0, "log": "/w/x.log", "observe": None,
            "gpus": [{"index": n, "uuid": f"GPU-{n}"} for n in range(4)],
        },
        "started_at": 1000.0, "supervisor_recorded": True, "supervisor_alive": True, "leader_alive": True,
        "heartbeat": {
            "phase": "training", "step": step, "total_steps": 600, "mono": mono - 1, "wall": 1000.0 + mono,
            "phase_since": 0.0, "deadline_s": 30.0, "median_step_s": 2.0,
            "metrics": {"tokens_per_s": 12034.4},
        },
        "family": {"count": 2, "cpu_s": 0.4, "states": {"S": 2}},
        "log": {"path": "/w/x.log", "exists": True, "size": 5, "mtime": 1000.0 + mono,
                "resume": {"offset": step}},
    }  # fmt: skip
    return {"now": {"mono": mono, "wall": 1000.0 + mono}, "sample_s": 0.5, "runs": [facts | run], "hidden": 0}


ENDED = {"exit": {"cause": "exited", "code": 0, "wall_s": 9.0, "ended_at": 1009.0}}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """watch() over a script of answers and errors; (looks, connections, pauses, requests)."""

    def play(*script: dict[str, Any] | DflashError, tag: str | None = "demo") -> Any:
        steps: Iterator[Any] = iter(script)
        connections: list[Any] = []
        pauses: list[float] = []
        requests: list[dict[str, Any]] = []

        class Fake:
            host = HOST

            def close(self) -> None:
                raise Unreachable("already dead")

        def connect(host: Host) -> Any:
            connections.append(Fake())
            return connections[-1]

        def call(engine: Any, op: str, request: dict[str, Any], **rest: Any) -> dict[str, Any]:
            requests.append(request | {"resume": dict(request["resume"])})
            step = next(steps)
            if isinstance(step, Exception):
                raise step
            return step

        monkeypatch.setattr("dflashctl.runs.status.call", call)
        monkeypatch.setattr("dflashctl.gpus.facts.ask_host", lambda engine, samples: {"samples": []})
        monkeypatch.setattr("dflashctl.runs.lastseen.cache_file", lambda host: Path("/nonexistent/x"))
        looks = list(watch(HOST, tag=tag, connect=connect, sleep=pauses.append))
        return looks, connections, pauses, requests

    return play


def states(looks: list[Look]) -> list[str]:
    return [look.rows[0].verdict.state for look in looks]


def test_lost_contact_is_unknown_and_the_watch_goes_on(scripted: Callable[..., Any]) -> None:
    gone = Unreachable("no route to host")
    looks, connections, pauses, _ = scripted(answer(10, 5), gone, gone, answer(30, 9), answer(32, 9, **ENDED))
    assert states(looks) == ["running", "unknown", "unknown", "running", "finished"]
    told = "; ".join(looks[2].rows[0].verdict.evidence)
    assert "no route to host" in told and "last seen running at step 5" in told
    assert len(connections) == 3, "each failure makes a new connection"
    assert pauses[1] < pauses[2], "the pauses grow"


def test_a_frozen_container_is_frozen_and_not_the_end(scripted: Callable[..., Any]) -> None:
    looks, *_ = scripted(answer(10, 5), ContainerDown("container 200 is frozen"), answer(30, 9, **ENDED))
    assert states(looks) == ["running", "frozen", "finished"]


def test_a_first_look_without_contact_is_an_error(scripted: Callable[..., Any]) -> None:
    with pytest.raises(Unreachable):
        scripted(Unreachable("no route to host"))


def test_another_error_ends_the_watch(scripted: Callable[..., Any]) -> None:
    with pytest.raises(DflashError, match="bad key"):
        scripted(answer(10, 5), DflashError("bad key"))


def test_a_tag_is_followed_by_id_and_its_log_is_scanned_on(scripted: Callable[..., Any]) -> None:
    *_, requests = scripted(answer(10, 5), answer(12, 6), answer(14, 6, **ENDED))
    assert [(each["tag"], each["id"]) for each in requests] == [
        ("demo", None),
        (None, "20261130T120000000-abcdef"),
        (None, "20261130T120000000-abcdef"),
    ]
    assert [each["resume"] for each in requests] == [
        {},
        {"20261130T120000000-abcdef": {"offset": 5}},
        {"20261130T120000000-abcdef": {"offset": 6}},
    ]


def test_the_watcher_knows_how_long_it_has_seen_a_step() -> None:
    memory = Memory()
    ages = []
    for mono, step in ((10, 5), (12, 5), (14, 6), (20, 6)):
        look = judged(HOST, answer(mono, step), GPUS, memory)
        ages.append(look.rows[0].facts.step_seen_age_s)
    assert ages == [None, 2.0, 0.0, 6.0]
    assert judged(HOST, answer(200, 6), GPUS, memory).rows[0].verdict.state == "wedged"


def test_the_overview_reads_as_documented() -> None:
    look = judged(HOST, answer(100, 118), GPUS, Memory())
    lines = plain(view.overview(look)).splitlines()
    assert lines[0] == "here · 8 GPUs · 1 run"
    assert lines[1].split() == ["TAG", "STATE", "FOR", "STEP", "TOK/S", "GPUS", "EVIDENCE"]
    assert lines[2].startswith(
        "demo  running  1m40s  118/600  12,034  0-3   step 118 of 600, 2.0 s each; heartbeat"
    )


def test_since_when_and_how_long_ago_are_told_apart() -> None:
    live, over = (judged(HOST, answer(100, 118, **more), GPUS, Memory()) for more in ({}, ENDED))
    row, done = view.run_document(live.rows[0]), view.run_document(over.rows[0])
    assert (row["for_s"], row["started_ago_s"], row["ended_ago_s"]) == (100.0, 100.0, None)
    assert (done["for_s"], done["started_ago_s"], done["ended_ago_s"]) == (None, 100.0, 91.0)
    assert view.cells(live.rows[0])[2] == "1m40s"
    assert view.cells(over.rows[0])[2] == "1m31s ago"
    assert "finished 1m31s ago (confidence high)" in plain(view.details(over, over.rows[0]))
    assert "running for 1m40s (confidence" in plain(view.details(live, live.rows[0]))


def test_a_hostile_tag_and_evidence_stay_one_line() -> None:
    hostile = {"tag": "x\x1b[2J\nnext", "log": "/w/x.log"}
    look = judged(HOST, answer(100, 118, record=hostile), GPUS, Memory())
    shown = plain(view.overview(look)) + plain(view.details(look, look.rows[0]))
    assert "\x1b" not in shown
    assert not [line for line in shown.splitlines() if line.startswith("next")]


def test_missing_gpus_are_said() -> None:
    host = HOST.model_copy(update={"gpus": HOST.gpus.model_copy(update={"expect": 9})})
    assert (
        view.title(judged(host, answer(100, 118), GPUS, Memory()))
        == "here · 8 GPUs · GPUs: 9 GPUs are expected · 1 run"
    )


def test_the_cache_of_what_was_last_seen(tmp_path: Path) -> None:
    path = tmp_path / "seen" / "here.json"
    seen = [lastseen.Seen("20261130T120000000-abcdef", "demo", "running", 118, (0, 1), 1000.0)]
    assert lastseen.load(HOST, path) == []
    lastseen.store(HOST, seen, path)
    assert lastseen.load(HOST, path) == seen
    assert [each.name for each in path.parent.iterdir()] == ["here.json"]
    path.write_text("{")
    assert lastseen.load(HOST, path) == []


@pytest.mark.parametrize(("survivors", "left"), [([], ["b"]), ([{"pid": 7}], ["a", "b"])])
def test_a_run_that_was_killed_is_not_last_seen_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survivors: list[Any], left: list[str]
) -> None:
    """The container went down after a kill: `status` told the killed run as last seen running."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lastseen.store(HOST, [lastseen.Seen(name, name, "running", 1, (0,), 1000.0) for name in ("a", "b")])
    answer = {"id": "a", "survivors": survivors}
    monkeypatch.setattr(stopping, "call", lambda *words, **more: answer)
    engine = SimpleNamespace(host=HOST)
    stopping.stop(engine, "a", who="x", reason="", grace_s=1.0, on_event=print)  # type: ignore[arg-type]
    assert [each.id for each in lastseen.load(HOST)] == left


def test_a_home_that_is_no_folder_hides_no_run(tmp_path: Path) -> None:
    """HOME=/dev/null, as services have it: `status` knew everything, and died of its cache."""
    (tmp_path / "file").write_text("")
    seen = [lastseen.Seen("20261130T120000000-abcdef", "demo", "running", 118, (0, 1), 1000.0)]
    lastseen.store(HOST, seen, tmp_path / "file" / "cache" / "here.json")
    assert lastseen.load(HOST, tmp_path / "file" / "cache" / "here.json") == []


def test_what_was_seen_of_a_host_is_not_said_of_another_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = [lastseen.Seen("20261130T120000000-abcdef", "demo", "running", 118, (0, 1), 1000.0)]
    lastseen.store(HOST, seen)
    assert lastseen.load(HOST.model_copy(update={"keep_releases": 9})) == seen
    assert lastseen.load(HOST.model_copy(update={"state_dir": "/elsewhere"})) == []
    lab = HOST.model_copy(update={"engine": "lab"})
    for folder, expected in (("one", seen), ("two", [])):
        monkeypatch.setenv("DFLASHCTL_LAB_DIR", str(tmp_path / folder))
        if expected:
            lastseen.store(lab, expected)
        assert lastseen.load(lab) == expected
    box = {"engine": "ssh", "ssh": Ssh(host="one")}
    lastseen.store(HOST.model_copy(update=box), seen)
    assert lastseen.load(HOST.model_copy(update=box | {"ssh": Ssh(host="two")})) == []
