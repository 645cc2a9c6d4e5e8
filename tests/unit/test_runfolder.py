"""Run with: pytest tests/unit/test_runfolder.py. Atomic writes, tolerant readers, names, live or not."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.agent.processes import proc
from dflashctl.agent.records import runfolder


def folder(tmp_path: Path, run_id: str = "20260102T030405678-0a1b2c") -> runfolder.RunFolder:
    run = runfolder.folder_of(str(tmp_path), run_id)
    Path(run.path).mkdir(parents=True)
    return run


def test_ids_sort_by_time_and_never_repeat() -> None:
    ids = [runfolder.new_id(1_767_323_045.678 + second) for second in range(100)]
    assert ids == sorted(ids)
    assert ids[0].startswith("20260102T030405678-")
    assert len({runfolder.new_id(5.0) for _ in range(100)}) == 100
    assert all(runfolder.ID_PATTERN.fullmatch(one) for one in ids)


@pytest.mark.parametrize("ahead_s", [0.0, 0.5, 7200.0, 10 * 365 * 86400.0])
def test_an_id_sorts_behind_the_newest_one_whatever_the_clock_says(ahead_s: float) -> None:
    now_s = 1_767_323_045.999
    newest = runfolder.new_id(now_s + ahead_s)
    following = runfolder.new_id(now_s, after=newest)
    assert runfolder.ID_PATTERN.fullmatch(following) and following > newest
    assert runfolder.time_of(following) == pytest.approx(now_s + ahead_s, abs=0.01), "and no further"
    assert runfolder.new_id(now_s, after=runfolder.new_id(now_s - 1)) < runfolder.new_id(now_s + 1)


def test_a_folder_whose_digits_are_no_time_stops_no_launch() -> None:
    assert runfolder.ID_PATTERN.fullmatch(runfolder.new_id(5.0, after="99999999T999999999-ffffff"))


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "20260102T030405678-0a1b2c/..", "20260102T030405678-0A1B2C"]
)
def test_what_is_no_id_never_becomes_a_path(name: str) -> None:
    with pytest.raises(ValueError, match="not a run id"):
        runfolder.folder_of("/state", name)


def test_a_written_file_carries_the_version_and_leaves_nothing_aside(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.write("record.json", {"tag": "a"})
    assert run.record().value == {"tag": "a", "version": 1}
    assert [one.name for one in Path(run.path).iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b'{"version": 1', "Expecting"),
        (b"[1]", "not a JSON object"),
        (b"{}", "no version"),
        (b'{"version": true}', "no version"),
        (b'{"version": "1"}', "no version"),
        (b'{"version": 2, "tag": "x"}', "version 2, newer than this dflashctl knows (1)"),
        (b"\xff\xfe", "codec"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"version": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}", "nested too deep"),  # too deep to pass on
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    run = folder(tmp_path)
    Path(run.file("record.json")).write_bytes(content)
    loaded = run.record()
    assert loaded.value is None
    assert loaded.problem is not None and said in loaded.problem and "record.json" in loaded.problem


def test_no_file_is_no_problem(tmp_path: Path) -> None:
    assert folder(tmp_path).exit() == (None, None)


def test_unknown_keys_are_kept_for_those_who_know_them(tmp_path: Path) -> None:
    run = folder(tmp_path)
    Path(run.file("record.json")).write_text('{"version": 1, "tag": "a", "from_tomorrow": 3}')
    assert run.record().value == {"version": 1, "tag": "a", "from_tomorrow": 3}


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder(tmp_path)
    run.write("record.json", {"tag": "old"})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run.write("record.json", {"tag": "new"})
    monkeypatch.undo()
    assert run.record().value == {"tag": "old", "version": 1}
    assert [one.name for one in Path(run.path).iterdir()] == ["record.json"]


def test_events_of_many_writers_never_mix(tmp_path: Path) -> None:
    run = folder(tmp_path)

    def write(name: int) -> None:
        for number in range(50):
            run.append_event("note", text="x" * 500, writer=name, number=number)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = run.events()
    assert len(events) == 200
    for name in range(4):
        assert [one["number"] for one in events if one["writer"] == name] == list(range(50))
    assert all(one["version"] == 1 and one["at"] > 0 and one["mono"] > 0 for one in events)


def test_a_half_written_line_is_skipped_and_spoils_no_later_one(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.append_event("launched")
    with open(run.file("events.jsonl"), "ab") as file:
        file.write(b'{"event": "sta')  # the disk was full
    assert [one["event"] for one in run.events()] == ["launched"]
    run.append_event("started")
    assert [one["event"] for one in run.events()] == ["launched", "started"]


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b'{"event": "note"}')), max_size=20))
def test_no_bytes_make_the_line_reader_raise(lines: list[bytes]) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\n".join(lines))
        file.flush()
        for event in runfolder.read_lines(file.name):
            assert isinstance(event, dict)


def test_lines_that_are_nested_too_deep_are_skipped(tmp_path: Path) -> None:
    """A program may write anything: the parser's own limit is no ValueError."""
    lines = ["[" * 200_000, '{"a":' * 200_000, '{"x": ' + "[" * 900 + "]" * 900 + "}", '{"x": [[{"y": 1}]]}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert list(runfolder.read_lines(str(tmp_path / "metrics.jsonl"))) == [{"x": [[{"y": 1}]]}]


def started(run: runfolder.RunFolder, **changes: Any) -> None:
    body = {"supervisor": proc.as_json(proc.own_identity()), "leader": {"pid": 7, "start": 8}}
    run.write("supervisor.json", {**body, **proc.here(), **changes})


def test_a_run_lives_as_long_as_its_supervisor(tmp_path: Path) -> None:
    run = folder(tmp_path)
    assert not run.live()
    started(run)
    assert run.live()
    pid, start = proc.own_identity()
    started(run, supervisor={"pid": pid, "start": start - 1})
    assert not run.live()


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"init_start": 1 + proc.init_start()}])
def test_identities_of_another_boot_or_container_start_name_nobody(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    run = folder(tmp_path)
    started(run, **change)
    run.write("members.json", {"members": [{"pid": 9, "start": 9}], **proc.here(), **change})
    assert run.identities() == (None, [])
    assert not run.live()


def test_identities_come_from_both_files(tmp_path: Path) -> None:
    run = folder(tmp_path)
    started(run)
    run.write("members.json", {"members": [{"pid": 9, "start": 9}, {"pid": "x"}], **proc.here()})
    assert run.identities() == (proc.own_identity(), [(7, 8), (9, 9)])


def test_runs_are_listed_newest_first_and_others_are_nobodys(tmp_path: Path) -> None:
    for name in ("20260102T030405678-0a1b2c", "20260103T030405678-0a1b2c", "lost+found", "x.tmp"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    ids = [run.id for run in runfolder.list_runs(str(tmp_path))]
    assert ids == ["20260103T030405678-0a1b2c", "20260102T030405678-0a1b2c"]
    assert runfolder.list_runs(str(tmp_path / "nowhere")) == []


def test_runs_that_cannot_be_looked_at_are_not_no_runs(tmp_path: Path) -> None:
    """Another user's folder, a mount that fails: `status` said that nothing was running."""
    assert runfolder.list_runs(str(tmp_path)) == []
    (tmp_path / "runs").symlink_to("runs")  # an error that root meets, too
    with pytest.raises(OSError, match="runs"):
        runfolder.list_runs(str(tmp_path))


def test_an_ended_run_is_finished_whatever_pids_say(tmp_path: Path) -> None:
    run = folder(tmp_path)
    started(run)
    assert [one.id for one in runfolder.unfinished_runs(str(tmp_path))] == [run.id]
    run.write("exit.json", {"code": 0})
    assert runfolder.unfinished_runs(str(tmp_path)) == []


def test_the_log_is_found_after_a_later_run_moved_it(tmp_path: Path) -> None:
    run = folder(tmp_path)
    log = tmp_path / "t.log"
    record = {"log": str(log)}
    log.write_text("mine")
    assert run.log_path(record) == str(log)
    log.rename(f"{log}.{run.id}")
    assert run.log_path(record) == f"{log}.{run.id}"
    assert run.log_path({}) == ""


def test_json_files_are_readable_by_people(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.write("record.json", {"b": 1, "a": 2})
    text = Path(run.file("record.json")).read_text()
    assert re.match(r'\{\n "a": 2,\n "b": 1,\n "version": 1\n\}\n', text)
    assert json.loads(text)["version"] == 1
