"""Run with: pytest tests/local/test_pull.py. What a run left comes home whole, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pull_kit import OLD, Listening, envelope, fetch, folder, host, listened, tree

from dflashctl.cli.main import run
from dflashctl.config.hosts import Host
from dflashctl.errors import NotFound, Unreachable, UsageError, VerificationFailed
from dflashctl.history.places import PART, problem_of
from dflashctl.history.pull import pull
from dflashctl.remote.engine import Completed
from dflashctl.remote.local import LocalEngine

__all__ = ["folder", "host"]


def test_checkpoints_come_whole_with_their_times_and_a_second_time_costs_nothing(
    folder: Path, host: Host, tmp_path: Path
) -> None:
    into = tmp_path / "here"
    result = fetch(host, into)
    assert tree(into) == tree(folder / "checkpoints")
    assert (result.bytes, len(result.fetched), result.refused) == (71_000, 3, [])
    assert (into / "step_1/w.bin").stat().st_mtime == OLD
    again = fetch(host, into)
    assert (again.bytes, again.fetched, len(again.same)) == (0, [], 3)


def test_resumed_at_twenty_random_places(folder: Path, host: Host, tmp_path: Path) -> None:
    rng = random.Random(3)
    data = rng.randbytes(4_000_000)
    (folder / "checkpoints" / "big").write_bytes(data)
    cuts = [rng.randrange(0, 250_000) for _ in range(20)]
    into = tmp_path / "here"
    result = fetch(host, into, cuts=cuts)
    assert cuts == []
    assert (into / "big").read_bytes() == data
    assert tree(into) == tree(folder / "checkpoints")
    assert result.bytes == 4_071_000, "no byte came twice"


def test_bytes_travel_as_they_are(folder: Path, host: Host, tmp_path: Path) -> None:
    """As base64 a third more of them travelled, and both ends were busy with nothing else."""
    (folder / "checkpoints" / "big").write_bytes(random.Random(5).randbytes(2_000_000))
    engine = Listening(host)
    listened(host, tmp_path / "here", engine)
    assert tree(tmp_path / "here") == tree(folder / "checkpoints")
    assert engine.base64 == 0 and 2_071_000 < engine.raw < 2_100_000


def at_byte(position: int, change: Callable[[int], bytes]) -> Callable[[bytes, int], bytes]:
    """Harm to one byte of an answer in raw bytes."""

    def harm(data: bytes, at: int) -> bytes:
        if not at <= position < at + len(data):
            return data
        here = position - at
        return data[:here] + change(data[here]) + data[here + 1 :]

    return harm


@pytest.mark.parametrize(
    "harm",
    [
        lambda data, at: data.replace(b"\n", b"\r\n"),
        lambda data, at: data.replace(b"\r", b""),
        lambda data, at: bytes(each & 0x7F for each in data),
        at_byte(500_000, lambda byte: bytes([byte ^ 1])),
        at_byte(500_000, lambda byte: b""),
        at_byte(500_000, lambda byte: bytes([byte, 7])),
    ],
    ids=["newlines", "carriage returns", "seven bits", "one flipped", "one lost", "one more"],
)
def test_a_line_that_changes_bytes_is_asked_for_base64(
    harm: Callable[[bytes, int], bytes], folder: Path, host: Host, tmp_path: Path
) -> None:
    (folder / "checkpoints" / "big").write_bytes(random.Random(5).randbytes(1_000_000))
    engine = Listening(host, harm)
    listened(host, tmp_path / "here", engine)
    assert tree(tmp_path / "here") == tree(folder / "checkpoints"), "whole, and no part is left"
    assert engine.base64 > 1_333_000


def test_two_pulls_at_once_do_not_write_into_one_part(folder: Path, host: Host, tmp_path: Path) -> None:
    part = tmp_path / "here" / "step_1" / f"w.bin{PART}"
    part.parent.mkdir(parents=True)
    with part.open("wb") as other:
        other.write(b"a" * 10)
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        result = fetch(host, tmp_path / "here")
        assert result.refused == [("step_1/w.bin", "another pull is bringing it")]
        assert part.read_bytes() == b"a" * 10 and len(result.fetched) == 2
    assert fetch(host, tmp_path / "here").fetched == ["step_1/w.bin"]


class Rotating(LocalEngine):
    """The run removes a checkpoint as soon as the list is made."""

    removed: Path

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", **rest: Any) -> Completed:
        if b"pull_file" in envelope(stdin):
            shutil.rmtree(self.removed, ignore_errors=True)
        return super().run(argv, stdin=stdin, **rest)


def test_a_checkpoint_that_is_removed_meanwhile_is_named_and_the_rest_comes(
    folder: Path, host: Host, tmp_path: Path
) -> None:
    def connect(target: Host) -> Rotating:
        engine = Rotating(target)
        engine.removed = folder / "checkpoints" / gone
        return engine

    gone, into = "step_1", tmp_path / "here"
    result = pull(host, tag="t", what="checkpoints", into=into, connect=connect)
    assert result.gone == ["step_1/w.bin"] and result.refused == []
    assert tree(into) == {"empty": b"", "step_2/w.bin": b"b" * 70_000}, "no part is left"
    assert not (into / "step_1").exists(), "an empty folder looks like a checkpoint"
    gone = ""
    with pytest.raises(NotFound, match="run t has no checkpoints") as error:
        pull(host, tag="t", what="checkpoints", into=tmp_path / "other", connect=connect)
    assert "--what metrics" in (error.value.next or "")


@pytest.mark.parametrize("newer", [1, 5])
def test_a_run_that_had_removed_all_that_was_listed_is_listed_again(
    newer: int, folder: Path, host: Host, tmp_path: Path
) -> None:
    """Or it would have no checkpoints, though it always has its newest."""
    here, steps = folder / "checkpoints", iter(range(3, 3 + newer))
    (here / "empty").unlink()

    class Saving(LocalEngine):
        def run(self, argv: Sequence[str], *, stdin: bytes = b"", **rest: Any) -> Completed:
            step = next(steps, None) if b"pull_file" in envelope(stdin) else None
            if step is not None:
                for old in here.iterdir():
                    shutil.rmtree(old)
                (here / f"step_{step}").mkdir()
                (here / f"step_{step}" / "w.bin").write_bytes(b"w" * step)
            return super().run(argv, stdin=stdin, **rest)

    into = tmp_path / "here"
    if newer == 1:
        assert pull(host, tag="t", what="checkpoints", into=into, connect=Saving).gone == []
        assert tree(into) == {"step_3/w.bin": b"www"}
    else:
        with pytest.raises(NotFound, match="run t removes its checkpoints sooner"):
            pull(host, tag="t", what="checkpoints", into=into, connect=Saving)
    assert [each.name for each in into.iterdir()] == (["step_3"] if newer == 1 else [])


def test_a_part_of_another_file_is_begun_anew(folder: Path, host: Host, tmp_path: Path) -> None:
    into = tmp_path / "here"
    into.mkdir()
    (into / f"empty{PART}").write_bytes(b"something")
    (into / "step_2").mkdir()
    (into / "step_2" / f"w.bin{PART}").write_bytes(b"b" * 100 + b"X" + b"b" * 100)
    result = fetch(host, into)
    assert tree(into) == tree(folder / "checkpoints")
    assert result.bytes == 71_000


def test_a_newer_file_here_is_left_alone(folder: Path, host: Host, tmp_path: Path) -> None:
    into = tmp_path / "here"
    (into / "step_1").mkdir(parents=True)
    (into / "step_1/w.bin").write_bytes(b"mine")
    result = fetch(host, into)
    assert (into / "step_1/w.bin").read_bytes() == b"mine"
    assert result.refused == [("step_1/w.bin", "the file here is newer")]
    assert len(result.fetched) == 2
    os.utime(into / "step_1/w.bin", (OLD - 100, OLD - 100))
    assert fetch(host, into).fetched == ["step_1/w.bin"], "an older one is replaced"


def test_a_newer_file_with_the_same_bytes_is_the_same(folder: Path, host: Host, tmp_path: Path) -> None:
    into = tmp_path / "here"
    (into / "step_1").mkdir(parents=True)
    (into / "step_1/w.bin").write_bytes(b"a" * 1000)
    result = fetch(host, into)
    assert result.same == ["step_1/w.bin"] and result.refused == []


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/x", "", ".", "a//b", "a/./b", "a\0b", "~/x", "a\\b", "C:/x", ".."],
)
def test_names_that_leave_the_folder_are_refused(
    name: str, folder: Path, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that lies about its names."""
    assert problem_of(name) is not None
    from dflashctl.history import pull as module

    real = module.call

    def lying(engine: Any, op: str, request: dict[str, Any], **rest: Any) -> dict[str, Any]:
        answer = real(engine, op, request, **rest)
        if op == "pull_list":
            answer["files"][0]["path"] = name
            answer["links"] = [{"path": name, "target": "step_1"}]
        return answer

    monkeypatch.setattr(module, "call", lying)
    before = sorted(tmp_path.rglob("*"))
    into = tmp_path / "deep" / "er" / "here"
    result = fetch(host, into)
    assert [path for path, _ in result.refused] == [name, name]
    fresh = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert all(path == into or into in path.parents or path in into.parents for path in fresh)
    assert len(result.fetched) == 2


def test_links_stay_in_the_folder(folder: Path, host: Host, tmp_path: Path) -> None:
    there = folder / "checkpoints"
    (there / "latest").symlink_to("step_2")
    (there / "step_1" / "up").symlink_to("../step_2/w.bin")
    (there / "out").symlink_to("../../../etc")
    (there / "root").symlink_to("/etc/passwd")
    os.mkfifo(there / "pipe")
    into = tmp_path / "here"
    result = fetch(host, into)
    assert sorted(result.linked) == ["latest", "step_1/up"]
    assert {path for path, _ in result.refused} == {"out", "root", "pipe"}
    assert (into / "latest" / "w.bin").read_bytes() == b"b" * 70_000
    assert not (into / "out").is_symlink() and not (into / "root").exists()
    again = fetch(host, into)
    assert {"latest", "step_1/up"} <= set(again.same)


def test_a_checkpoint_that_is_being_written_is_not_brought_home(
    folder: Path, host: Host, tmp_path: Path
) -> None:
    aside = folder / "checkpoints" / ".step-0000003.tmp"
    aside.mkdir()
    (aside / "model.safetensors").write_bytes(b"half of it")
    result = fetch(host, tmp_path / "here")
    assert sorted(result.fetched) == ["empty", "step_1/w.bin", "step_2/w.bin"] and result.refused == []


def test_a_link_here_is_not_written_through(folder: Path, host: Host, tmp_path: Path) -> None:
    into, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    into.mkdir()
    elsewhere.mkdir()
    (into / "step_1").symlink_to(elsewhere)
    (into / "empty").symlink_to(elsewhere / "x")
    result = fetch(host, into)
    assert list(elsewhere.iterdir()) == []
    assert {path for path, _ in result.refused} == {"step_1/w.bin", "empty"}


@pytest.mark.parametrize("name", ["w.bin", "w.bin.dflash-part"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_here_is_neither_waited_for_nor_replaced(
    name: str, make: Any, folder: Path, host: Host, tmp_path: Path
) -> None:
    place = tmp_path / "here" / "step_1" / name
    place.parent.mkdir(parents=True)
    make(place)
    result = fetch(host, tmp_path / "here")
    assert [path for path, _ in result.refused] == ["step_1/w.bin"] and len(result.fetched) == 2
    assert place.exists() and not place.is_file()


def test_bytes_that_arrive_changed_even_as_base64_do_not_pass(
    folder: Path, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflashctl.history import arrival as module

    real = module.call

    def other(engine: Any, op: str, request: dict[str, Any], *, on_event: Any, **rest: Any) -> dict[str, Any]:
        def listen(event: dict[str, Any]) -> None:
            on_event({**event, "sha256": "0" * 64} if "sha256" in event else event)

        return real(engine, op, request, on_event=listen, **rest)

    monkeypatch.setattr(module, "call", other)
    with pytest.raises(VerificationFailed, match="arrived different"):
        fetch(host, tmp_path / "here")
    assert tree(tmp_path / "here") == {}


def test_a_line_that_stays_dead_is_given_up(folder: Path, host: Host, tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        fetch(host, tmp_path / "here", cuts=[0] * 50)


def test_a_folder_that_cannot_be_written_is_the_persons_to_mend(
    folder: Path, host: Host, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*/file/here.*Not a directory"):
        fetch(host, tmp_path / "file" / "here")


def test_metrics_and_log(folder: Path, host: Host, tmp_path: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    fetch(host, tmp_path / "m", "metrics")
    assert {"record.json", "exit.json", "metrics.jsonl", "environment.json"} <= set(tree(tmp_path / "m"))
    fetch(host, tmp_path / "l", "log")
    assert tree(tmp_path / "l") == {"train_t.log": b"step 1\n"}


def test_nothing_to_bring_home(box: Any, host: Host, tmp_path: Path) -> None:
    box.wait(box.python("pass", "t"))
    with pytest.raises(NotFound, match="run t has no checkpoints"):
        fetch(host, tmp_path / "here")


def test_as_a_person_types_it(
    folder: Path, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    hosts = tmp_path / "hosts.yaml"
    entry = {key: getattr(host, key) for key in ("engine", "python", "state_dir")}
    hosts.write_text(json.dumps({"version": 1, "defaults": {"host": "here"}, "hosts": {"here": entry}}))
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    words: Callable[..., int] = lambda *more: run(["pull", "t", *more])  # noqa: E731
    assert words() == 0
    out = capfd.readouterr().out
    assert out == f"3 files, 71 kB, verified by sha256 -> pulled/t/{folder.name}/checkpoints\n"
    assert words("--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["schema"], document["bytes"], len(document["same"])) == ("dflashctl.pull/1", 0, 3)
    assert words("--what", "soul") == 2
    (folder / "checkpoints" / "\x1b[2J").symlink_to("/etc")
    assert words() == 4
    err = capfd.readouterr().err
    assert "refused: \\x1b[2J: a link that leaves the folder" in err and "\x1b" not in err
    assert run(["pull", "nobody"]) == 6
