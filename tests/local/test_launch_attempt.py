"""Run with: pytest tests/local/test_launch_attempt.py. A launch on the line with both sides, on this machine:
what it takes is taken, for every other one here."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.gpus import hostfacts, reservations
from dflashctl.agent.records import runfolder
from dflashctl.config.hosts import Host
from dflashctl.config.recipe import Recipe
from dflashctl.config.resolve import resolve
from dflashctl.errors import GpusBusy, Locked, Unreachable
from dflashctl.gpus.choose import choose, parse
from dflashctl.remote.local import LocalEngine
from dflashctl.runs.launch import plan_launch
from dflashctl.runs.launching import Attempt


class Place:
    """Two hosts.yaml entries of this machine with state folders of their own (as two containers have), and
    one nvidia-smi with two idle GPUs that nobody else's test has."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uuids = [f"GPU-{uuid.uuid4()}" for _ in range(2)]
        smi = root / "bin" / "nvidia-smi"
        smi.parent.mkdir()
        rows = "".join(
            f"{n}, {u}, 0, 143771, 0, 30, 70.1, Disabled, H200\\n" for n, u in enumerate(self.uuids)
        )
        smi.write_text(f"#!/bin/sh\ncase $1 in *query-gpu*) printf '{rows}';; esac\n")
        smi.chmod(0o755)
        self.box: Any = None

    def engine(self, name: str) -> LocalEngine:
        at = self.root / name
        at.mkdir(exist_ok=True)
        path = f"{self.root}/bin:{os.environ['PATH']}"
        folders = {
            "code_root": f"{at}/code",
            "workdir": str(at),
            "log_dir": str(at),
            "state_dir": f"{at}/state",
        }
        return LocalEngine(Host(name=name, engine="local", python=sys.executable, path=path, **folders))

    def launch(
        self, name: str, tag: str = "t", gpus: str = "0,", command: str = "sleep 60"
    ) -> dict[str, Any]:
        """As `dflashctl launch` does it."""
        body = {"version": 1, "name": "r", "launch": {"command": command.split()}}
        engine = self.engine(name)
        with Attempt(engine, samples=1) as attempt:
            facts = attempt.facts()
            chosen = choose(facts.box, parse(gpus))
            plan = plan_launch(
                engine.host,
                resolve(Recipe.model_validate(body), tag),
                run_id=runfolder.new_id(),
                inside=facts.inside,
                gpus=chosen,
                created_by="ada@laptop",
            )
            return {**attempt.start(plan, {}), "uuids": [gpu.uuid for gpu in chosen]}

    def folder(self, name: str, answer: dict[str, Any]) -> runfolder.RunFolder:
        return runfolder.folder_of(str(self.root / name / "state"), answer["id"])


@pytest.fixture
def place(tmp_path: Path, box: Any) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for name in ("one", "two"):
        box.state_dir = str(tmp_path / name / "state")
        for run in runfolder.list_runs(box.state_dir):
            box.stop(run.id, grace_s=0.0)


def test_a_gpu_is_taken_before_it_is_opened_and_also_for_those_who_see_no_record(place: Place) -> None:
    first = place.launch("one")
    assert first["outcome"] == "started"
    with pytest.raises(GpusBusy, match=rf"GPU 0: reserved by t \({first['id']}\)"):
        place.launch("two")
    assert place.launch("two", gpus="1")["uuids"] == [place.uuids[1]], "any idle one: not the reserved one"


def test_it_is_free_again_with_the_end_of_the_run(place: Place, until: Callable[..., Any]) -> None:
    run = place.folder("one", place.launch("one", command="true"))
    until(lambda: run.has("exit.json") and not run.live())
    assert place.launch("two")["outcome"] == "started"


def test_it_stays_taken_while_the_program_outlives_its_supervisor(
    place: Place, until: Callable[..., Any]
) -> None:
    first = place.launch("one")
    supervisor = place.folder("one", first).identities()[0]
    assert supervisor is not None
    os.kill(supervisor[0], 9)
    until(lambda: not place.folder("one", first).live())
    with pytest.raises(GpusBusy):
        place.launch("two")


def test_of_many_launches_at_once_no_two_get_the_same_gpu(place: Place) -> None:
    got: list[str] = []
    refused: list[Exception] = []

    def one(number: int) -> None:
        try:
            got.extend(place.launch(("one", "two")[number % 2], f"t{number}", gpus="1")["uuids"])
        except GpusBusy as error:
            refused.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == sorted(place.uuids), "each of the two GPUs once"
    assert len(refused) == 2


def test_a_program_that_did_not_start_takes_nothing(place: Place) -> None:
    assert place.launch("one", command="/no/such/program")["outcome"] == "failed"
    assert place.launch("two")["outcome"] == "started"


def test_a_laptop_that_is_gone_after_its_order_leaves_the_run_with_its_gpus(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No word to the host how it came out: the host finds the supervisor itself."""
    monkeypatch.setattr("dflashctl.runs.launching.Attempt.start", start_and_vanish)
    place.launch("one")
    monkeypatch.undo()
    with pytest.raises(GpusBusy, match="reserved by t"):
        place.launch("two")


def start_and_vanish(attempt: Any, plan: Any, secrets: Any) -> dict[str, Any]:
    record = plan.record
    uuids = [gpu["uuid"] for gpu in record["gpus"]]
    attempt._gpus.say(do="take", run=plan.run_id, tag=record["tag"], uuids=uuids, container=None, by="ada")
    attempt._inside.say(do="launch", request=plan.request({}, 0.0))
    return dict(attempt._inside.result(60.0))


def test_a_lock_that_is_held_for_too_long_is_said_with_its_holder(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    with Attempt(place.engine("one"), samples=1) as first:
        first.facts()
        monkeypatch.setattr("dflashctl.runs.launching.GPU_LOCK_S", 0.2)
        with (
            Attempt(place.engine("two"), samples=1, on_wait=heard.append) as second,
            pytest.raises(Locked, match=r"another launch holds the lock on this machine's GPUs .*pid \d+"),
        ):
            second.facts()
    assert heard and heard[0].startswith("pid ")


def test_a_launch_without_gpus_asks_no_host(place: Place) -> None:
    (place.root / "bin" / "nvidia-smi").write_text("#!/bin/sh\nsleep 60\n")
    with Attempt(place.engine("one"), samples=0) as attempt:
        assert attempt.facts().box.gpus == ()


def test_an_attempt_that_is_left_starts_nothing(place: Place) -> None:
    with Attempt(place.engine("one"), samples=1) as attempt:
        attempt.facts()
    with pytest.raises(Unreachable, match="nothing was started"):
        attempt._inside.result(60.0)
    assert runfolder.list_runs(str(place.root / "one" / "state")) == []


def test_a_reservation_counts_while_its_process_lives(tmp_path: Path) -> None:
    path = str(tmp_path / "gpus.json")
    assert reservations.read(path) == []
    assert not reservations.add(path, {"run": "20260101T000000000-aaaaaa"}, 0.1)
    Path(path).write_text("{")
    assert reservations.read(path) == [], "damaged: nothing is known, and nothing breaks"
    assert "reservations" in hostfacts.host_facts({"nvidia_smi": str(tmp_path / "none")}, None)
