"""Run with: pytest tests/local/test_runs_repair.py. Damaged files of ended runs: what is proven is rebuilt,
the damaged bytes are kept, and nothing else is touched.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflashctl.agent.history import curate, listing, repair
from dflashctl.agent.processes import proc
from dflashctl.agent.records import runfolder
from dflashctl.cli.main import run

JSON_FILES = ("record.json", "supervisor.json", "exit.json")
HALF = b'{"version": 1, "tag": "x'
DAMAGE = [HALF, b"", b"\0" * 400, b"[]", b'{"tag": "x"}', b"\xff\xfe{", b'{"version": "1"}']


@pytest.fixture
def ended(box: Any, until: Callable[..., Any]) -> Path:
    """The folder of a run `t` that ended with code 3."""
    answer = box.python("import sys; print('step 1'); sys.exit(3)", "t")
    box.wait(answer)
    return over(box.run(answer), until)


def over(run: runfolder.RunFolder, until: Callable[..., Any]) -> Path:
    """Its folder, once its supervisor is gone, too: it goes a moment after its last word."""
    until(lambda: repair.busy(run, proc.table(), {}) is None)
    return Path(run.path)


def mend(box: Any, **more: Any) -> dict[str, Any]:
    return repair.repair_runs({"state_dir": box.state_dir, "who": "ann@laptop", **more}, None)


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def aside(folder: Path, name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob(f"{name}.damaged-*"))]


def test_a_history_without_damage_is_left_as_it_is(box: Any, ended: Path) -> None:
    before = content(ended)
    assert mend(box) == {"repaired": [], "left": []}
    assert content(ended) == before


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_record_is_rebuilt_whole_from_the_event_that_told_of_it(
    box: Any, ended: Path, damage: bytes
) -> None:
    record = read(ended / "record.json")
    (ended / "record.json").write_bytes(damage)
    (told,) = mend(box)["repaired"]
    assert (told["id"], told["tag"]) == (ended.name, "t")
    (file,) = told["files"]
    assert (file["name"], file["did"], file["source"], file["unknown"]) == (
        "record.json", "rebuilt", "events.jsonl", [],
    )  # fmt: skip
    rebuilt = read(ended / "record.json")
    mark = rebuilt.pop("rebuilt")
    assert rebuilt == record and mark["by"] == "ann@laptop"
    assert aside(ended, "record.json") == [damage]
    assert mend(box) == {"repaired": [], "left": []}, "once is enough"


def test_all_three_at_once_lean_on_each_other(box: Any, ended: Path) -> None:
    before = {name: read(ended / name) for name in JSON_FILES}
    for name in JSON_FILES:
        (ended / name).write_bytes(HALF)
    planned = mend(box, dry_run=True)
    assert all((ended / name).read_bytes() == HALF for name in JSON_FILES), "a dry run changes nothing"
    assert mend(box) == planned
    after = {name: read(ended / name) for name in JSON_FILES}
    for name in ("id", "tag", "recipe", "command", "env", "log", "boot_id", "init_start"):
        assert after["record.json"][name] == before["record.json"][name]
    for name in ("leader", "boot_id", "init_start"):
        assert after["supervisor.json"][name] == before["supervisor.json"][name]
    for name in ("code", "signal", "cause", "killed_by"):
        assert after["exit.json"][name] == before["exit.json"][name]
    assert after["exit.json"]["wall_s"] == pytest.approx(before["exit.json"]["wall_s"], abs=5.0)
    (facts,) = listing.list_runs({"state_dir": box.state_dir}, None)["runs"]
    assert facts["problems"] == [] and facts["exit"]["code"] == 3
    assert facts["record"]["tag"] == "t"


def test_a_missing_record_comes_back(box: Any, ended: Path) -> None:
    record = read(ended / "record.json")
    (ended / "record.json").unlink()
    (told,) = mend(box, id=ended.name)["repaired"]
    assert told["files"][0]["problem"] == "missing"
    assert read(ended / "record.json")["command"] == record["command"]
    assert aside(ended, "record.json") == []


def test_a_kill_stays_a_kill(box: Any, until: Callable[..., Any]) -> None:
    answer = box.python("import time; print('up', flush=True); time.sleep(600)", "t")
    until(lambda: "up" in box.log(answer))
    box.stop("t", reason="wrong lr")
    folder = over(box.run(answer), until)
    before = read(folder / "exit.json")
    (folder / "exit.json").write_bytes(b"")
    mend(box)
    after = read(folder / "exit.json")
    assert after["cause"] == "killed" and after["killed_by"] == before["killed_by"]
    assert (after["code"], after["signal"]) == (before["code"], before["signal"])


def test_a_run_that_never_started_stays_one(box: Any, until: Callable[..., Any]) -> None:
    folder = over(box.run(box.launch(["/no/such/program"], "t")), until)
    why = read(folder / "exit.json")["why"]
    (folder / "exit.json").write_bytes(HALF)
    mend(box)
    assert read(folder / "exit.json")["cause"] == "spawn_failed" and read(folder / "exit.json")["why"] == why


def test_an_end_that_nobody_can_prove_is_not_made_up(box: Any, ended: Path) -> None:
    (ended / "exit.json").write_bytes(HALF)
    (ended / "events.jsonl").write_text("")
    ((file,),) = ([each["files"] for each in mend(box)["repaired"]],)
    assert (file[0]["name"], file[0]["did"]) == ("exit.json", "set aside")
    assert not (ended / "exit.json").exists() and aside(ended, "exit.json") == [HALF]


@pytest.mark.parametrize("name", ["environment.json", "members.json", "heartbeat.json", "root_cause.json"])
def test_what_stands_nowhere_else_is_set_aside(box: Any, ended: Path, name: str) -> None:
    (ended / name).write_bytes(HALF)
    (told,) = mend(box)["repaired"]
    assert (told["files"][0]["did"], told["files"][0]["source"]) == ("set aside", None)
    assert not (ended / name).exists() and aside(ended, name) == [HALF]


def test_the_best_acceptance_length_is_in_the_metrics(box: Any, ended: Path) -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "acceptance_length": 2.44}, {"acceptance_length": 2.31}]
    (ended / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (ended / "summary.json").write_bytes(HALF)
    mend(box)
    summary = read(ended / "summary.json")
    assert summary["best_acceptance_length"] == 2.44 and summary["headline"] is None
    (ended / "metrics.jsonl").write_text('{"step": 1}\n')
    (ended / "summary.json").write_bytes(HALF)
    assert mend(box)["repaired"][0]["files"][0]["did"] == "set aside"


def test_damaged_lines_go_and_the_others_stay(box: Any, ended: Path) -> None:
    curate.note_run({"state_dir": box.state_dir, "tag": "t", "text": "a note", "who": "ann"}, None)
    events = (ended / "events.jsonl").read_bytes().splitlines(keepends=True)
    damaged = events[0] + b'{"event": "no\n\0\0\0\n' + b"".join(events[1:]) + b'{"half": '
    (ended / "events.jsonl").write_bytes(damaged)
    (told,) = mend(box)["repaired"]
    assert told["files"][0]["problem"] == "damaged lines: 3"
    assert aside(ended, "events.jsonl") == [damaged]
    kept = (ended / "events.jsonl").read_bytes().splitlines(keepends=True)
    assert kept[:-1] == events and json.loads(kept[-1])["event"] == "repaired"
    assert [note["text"] for note in curate.notes(runfolder.RunFolder(str(ended)))] == ["a note"]


def test_a_file_of_a_newer_dflashctl_is_no_damage(box: Any, ended: Path) -> None:
    newer = b'{"version": 9, "tag": "t"}'
    (ended / "record.json").write_bytes(newer)
    assert mend(box) == {"repaired": [], "left": []}
    assert (ended / "record.json").read_bytes() == newer


@pytest.mark.parametrize("name", JSON_FILES[:2])
def test_a_live_run_is_never_touched(box: Any, until: Callable[..., Any], name: str) -> None:
    """Also when the very file is damaged that says who its supervisor is."""
    answer = box.python("import time; print('up', flush=True); time.sleep(600)", "t")
    until(lambda: "up" in box.log(answer))
    folder = Path(box.run(answer).path)
    kept = (folder / name).read_bytes()
    (folder / name).write_bytes(HALF)
    assert mend(box) == {"repaired": [], "left": [{"id": folder.name, "why": "it lives"}]}
    assert (folder / name).read_bytes() == HALF and aside(folder, name) == []
    (folder / name).write_bytes(kept)
    assert len(box.family(answer)) == 1


def test_a_launch_that_may_be_at_work_is_left_alone(box: Any, ended: Path) -> None:
    fresh = ended.with_name(runfolder.new_id())
    fresh.mkdir()
    (fresh / "recipe.yaml").write_text("name: demo\n")
    told = mend(box)
    assert told["left"] == [{"id": fresh.name, "why": "it may be being launched at this moment"}]


def test_a_kill_at_work_is_not_disturbed(box: Any, ended: Path) -> None:
    from dflashctl.agent.runs.stop import stop_lock

    (ended / "record.json").write_bytes(HALF)
    with stop_lock(runfolder.RunFolder(str(ended))) as first:
        assert first
        assert mend(box)["left"] == [{"id": ended.name, "why": "a kill or another repair is at work"}]
    assert (ended / "record.json").read_bytes() == HALF


def test_two_people_at_once_repair_it_once(box: Any, ended: Path) -> None:
    record = read(ended / "record.json")
    (ended / "record.json").write_bytes(HALF)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: mend(box), range(8)))
    assert aside(ended, "record.json") == [HALF]
    assert read(ended / "record.json")["command"] == record["command"]


def test_a_run_of_an_older_launch_gets_what_its_files_prove(box: Any, ended: Path) -> None:
    """Its event `launched` has no copy of the record."""
    record = read(ended / "record.json")
    events = [json.loads(line) for line in (ended / "events.jsonl").read_text().splitlines()]
    events[0].pop("record")
    (ended / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (ended / "recipe.yaml").write_text("version: 1\nname: demo\nlaunch: {}\n")
    (ended / "record.json").write_bytes(HALF)
    (told,) = mend(box)["repaired"]
    (file,) = told["files"]
    assert told["tag"] is None and {"tag", "command", "log"} <= set(file["unknown"])
    rebuilt = read(ended / "record.json")
    assert (rebuilt["id"], rebuilt["recipe"], rebuilt["tag"]) == (ended.name, "demo", None)
    assert rebuilt["created_at"] == pytest.approx(record["created_at"], abs=5.0)
    assert rebuilt["boot_id"] == record["boot_id"]
    (facts,) = listing.list_runs({"state_dir": box.state_dir}, None)["runs"]
    assert facts["problems"] == [] and facts["exit"]["code"] == 3


@pytest.mark.parametrize("name", ["record.json", "events.jsonl"])
def test_a_run_that_cannot_be_read_keeps_no_other_from_being_mended(
    box: Any, ended: Path, until: Callable[..., Any], name: str
) -> None:
    answer = box.python("import sys; sys.exit(3)", "u")
    box.wait(answer)
    other = over(box.run(answer), until)
    (ended / name).unlink()
    (ended / name).mkdir()
    (other / "record.json").write_bytes(HALF)
    found = mend(box)
    assert [each["id"] for each in found["repaired"]] == [other.name]
    assert [each["id"] for each in found["left"]] == [ended.name] and name in found["left"][0]["why"]
    assert read(other / "record.json")["tag"] == "u"


def test_a_folder_that_tells_nothing_gets_no_record(box: Any, ended: Path) -> None:
    bare = ended.with_name("20260101T000000000-00000a")
    bare.mkdir()
    (bare / "exit.json").write_text(json.dumps({"version": 1, "cause": "exited", "code": 0}))
    assert mend(box) == {"repaired": [], "left": []}
    assert not (bare / "record.json").exists()


def test_the_time_in_an_id() -> None:
    assert runfolder.time_of("20261130T120000500-abcdef") == pytest.approx(1796040000.5)


@pytest.mark.parametrize("seed", range(3))
def test_any_cut_of_any_file_is_mended_and_the_bytes_are_kept(box: Any, ended: Path, seed: int) -> None:
    """Truncated, overwritten with zeros, or with another file's end: what is left reads without a problem."""
    rng = random.Random(seed)
    whole = content(ended)
    for _ in range(12):
        for path in ended.iterdir():
            path.unlink()
        for name, data in whole.items():
            (ended / name).write_bytes(data)
        names = rng.sample(
            ["record.json", "supervisor.json", "exit.json", "events.jsonl", "environment.json"], 2
        )
        hurt = {}
        for name in names:
            data = whole.get(name, b"")
            at = rng.randrange(len(data)) if data else 0
            hurt[name] = data[:at] + rng.choice([b"", b"\0" * (len(data) - at), b"}}" + data[-at // 2 :]])
            (ended / name).write_bytes(hurt[name])
        told = mend(box)
        did = {file["name"]: file["did"] for run in told["repaired"] for file in run["files"]}
        for name in did:
            assert aside(ended, name) == [hurt[name]], (seed, name, told)
        for name in ("record.json", "supervisor.json", "exit.json", "environment.json"):
            loaded = runfolder.read_json(str(ended / name))
            assert loaded.problem is None, (seed, names, told)
        if "events.jsonl" not in hurt:
            assert read(ended / "record.json")["tag"] == "t" and read(ended / "exit.json")["code"] == 3
        assert mend(box)["repaired"] == []


def test_as_a_person_types_it(
    box: Any, ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    hosts = tmp_path / "hosts.yaml"
    entry = f"{{engine: local, python: {sys.executable}, state_dir: {box.state_dir}}}"
    hosts.write_text(f"version: 1\nhosts:\n  here: {entry}\n")
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("COLUMNS", raising=False)

    def typed(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return (run(["runs", *words]), *capfd.readouterr())

    assert typed("repair") == (0, "repaired 0 runs\n", "")
    (ended / "exit.json").write_bytes(HALF)
    assert "next: dflashctl runs repair --dry-run" in typed("list")[1]
    code, out, _ = typed("repair", "--dry-run")
    assert code == 0 and out.startswith("would repair 1 run\n")
    row = next(line for line in out.splitlines() if line.startswith("t "))
    assert "exit.json  rebuilt from events.jsonl; not known any more: peak memory" in row
    assert (ended / "exit.json").read_bytes() == HALF
    assert typed("repair", "--json")[0] == 2, "nobody was asked"
    assert (ended / "exit.json").read_bytes() == HALF
    code, out, _ = typed("repair", "t", "--json", "--yes")
    document = json.loads(out)
    assert code == 0 and (document["schema"], document["dry_run"]) == ("dflashctl.repair/1", False)
    assert document["repaired"][0]["files"][0]["did"] == "rebuilt"
    assert "failed" in typed("list")[1] and "damaged" not in typed("list")[1]
    assert typed("repair", "nobody")[0] == 6
