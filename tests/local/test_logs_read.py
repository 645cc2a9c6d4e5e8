"""Run with: pytest tests/local/test_logs_read.py. Every byte once and in order, whatever happens."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_box import local_host

from dflashctl.agent import AgentError
from dflashctl.agent.logs import logread
from dflashctl.config.hosts import Host
from dflashctl.errors import ContainerDown, NotFound, Unreachable
from dflashctl.logs.reading import MAX_LINE_CHARS, Lines, Position, Source, overwritten, read, receive
from dflashctl.remote.engine import Completed
from dflashctl.remote.local import LocalEngine


class Got:
    """An `emit` that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""
        self.notices: list[str] = []
        self.run: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        self.run = event.get("run", self.run)
        self.data += base64.b64decode(event.get("data", ""))
        if "notice" in event:
            self.notices.append(event["notice"])


def ask(box: Any, **request: Any) -> tuple[Got, dict[str, Any]]:
    got = Got()
    return got, logread.read_log({"state_dir": box.state_dir, **request}, got)


def ended(box: Any, text: bytes, tag: str = "t") -> dict[str, Any]:
    """A run that has ended, with this log."""
    answer = box.python("pass", tag)
    box.wait(answer)
    Path(answer["log"]).write_bytes(text)
    return answer


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([b"a\n", b"\n", b"bc\r\n", b"\xff\n", b"long" * 30 + b"\n"])),
    st.sampled_from([b"", b"no end"]),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_the_last_lines_start_where_they_should(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], rest: bytes, wanted: int, before: int
) -> None:
    mine = [*lines, rest] if rest else lines
    earlier = b"earlier\n" * before
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(earlier + b"".join(mine))
    with path.open("rb") as file:
        start = logread.tail_start(file, len(earlier), path.stat().st_size, wanted)
        file.seek(start)
        assert file.read() == b"".join(mine[-wanted:])


def test_lines_and_all_and_an_offset(box: Any) -> None:
    answer = ended(box, b"one\ntwo\nthree\n")
    assert ask(box, tag="t", lines=2)[0].data == b"two\nthree\n"
    got, told = ask(box, tag="t")
    assert got.data == b"one\ntwo\nthree\n"
    assert got.run == {"id": answer["id"], "tag": "t", "path": answer["log"], "live": False, "secrets": []}
    assert told["done"] is True
    assert ask(box, id=answer["id"], offset=4, inode=told["inode"])[0].data == b"two\nthree\n"


def test_a_small_answer_says_that_more_is_there(box: Any) -> None:
    ended(box, b"x" * 1000)
    got, told = ask(box, tag="t", max_bytes=300)
    assert (len(got.data), told["done"], told["offset"], told["size"]) == (300, False, 300, 1000)


def test_without_a_tag_the_only_live_run_is_meant(box: Any, until: Callable[..., Any]) -> None:
    ended(box, b"old\n", "old")
    live = box.python("import time; print('mine', flush=True); time.sleep(600)", "live")
    ended(box, b"newer\n", "newer")
    until(lambda: "mine" in box.log(live))
    assert ask(box)[0].data == b"mine\n"
    box.python("import time; time.sleep(600)", "second")
    with pytest.raises(AgentError, match="2 runs are live: second, live"):
        ask(box)


def test_without_a_live_run_the_newest_is_meant(box: Any) -> None:
    ended(box, b"old\n", "old")
    ended(box, b"new\n", "new")
    assert ask(box)[0].data == b"new\n"


def test_the_log_of_an_earlier_run_with_the_tag_is_found_by_id(box: Any) -> None:
    first = ended(box, b"first\n")
    ended(box, b"second\n")
    assert ask(box, id=first["id"])[0].data == b"first\n"
    assert ask(box, tag="t")[0].data == b"second\n"


def test_a_log_that_is_not_there_is_said(box: Any) -> None:
    answer = ended(box, b"x\n")
    Path(answer["log"]).unlink()
    got, told = ask(box, tag="t")
    assert (got.notices, got.data, told["done"]) == (["missing"], b"", True)


def test_rotation_truncation_and_the_end_while_following(box: Any, until: Callable[..., Any]) -> None:
    answer = box.python("import time; time.sleep(600)")
    log = Path(answer["log"])
    got = Got()
    request = {"state_dir": box.state_dir, "tag": "t", "wait_s": 30.0}
    told: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: told.append(logread.read_log(request, got)))
    thread.start()
    log.write_bytes(b"one\n")
    until(lambda: got.data == b"one\n")
    log.rename(log.with_name("train.log.1"))
    with log.with_name("train.log.1").open("ab") as file:
        file.write(b"late\n")
    log.write_bytes(b"two\n")
    until(lambda: got.data == b"one\nlate\ntwo\n")
    log.write_bytes(b"")
    until(lambda: "truncated" in got.notices)
    log.write_bytes(b"three\n")
    until(lambda: got.data.endswith(b"three\n"))
    box.stop("t")
    thread.join(20)
    assert not thread.is_alive()
    assert got.data == b"one\nlate\ntwo\nthree\n"
    assert got.notices == ["rotated", "truncated"]
    assert told[0]["done"] is True


def test_a_reader_that_comes_back_after_a_rotation_reads_the_old_file_first(box: Any) -> None:
    answer = ended(box, b"one\ntwo\n")
    told = ask(box, tag="t")[1]
    log = Path(answer["log"])
    with log.open("ab") as file:
        file.write(b"three\n")
    log.rename(log.with_name("train_t.log.1"))
    log.write_bytes(b"four\n")
    got, _ = ask(box, tag="t", offset=told["offset"], inode=told["inode"])
    assert (got.data, got.notices) == (b"three\nfour\n", ["rotated"])


def test_a_log_cut_and_grown_past_the_old_place_is_begun_anew(box: Any) -> None:
    answer = ended(box, b"one\ntwo\n")
    log = Path(answer["log"])
    seen: list[str] = []
    position = Position(box.state_dir, "t", 0)
    source = Source(on_data=lambda data: seen.append(data.decode()), on_notice=seen.append)

    def ask_on() -> None:
        told = logread.read_log(position.request(0.0), lambda event: receive(event, position, source))
        position.inode, position.offset = told["inode"], told["offset"]

    ask_on()
    ask_on()
    with log.open("r+b") as file:  # the same inode
        file.truncate(0)
        file.write(b"a new beginning, and longer\n")
    ask_on()
    with log.open("ab") as file:
        file.write(b"more\n")
    ask_on()
    cut = "the log was cut; going on from its beginning"
    assert seen == ["one\ntwo\n", cut, "a new beginning, and longer\n", "more\n"]


def test_the_same_while_one_call_follows(box: Any, until: Callable[..., Any]) -> None:
    log = Path(box.python("import time; time.sleep(600)")["log"])
    got = Got()
    request = {"state_dir": box.state_dir, "tag": "t", "wait_s": 30.0}
    thread = threading.Thread(target=lambda: logread.read_log(request, got))
    thread.start()
    log.write_bytes(b"one\n")
    until(lambda: got.data == b"one\n")
    log.write_bytes(b"three and longer\n")  # cut and written again between two looks
    until(lambda: got.data == b"one\nthree and longer\n")
    box.stop("t")
    thread.join(20)
    assert got.notices == ["truncated"]


class Cut(LocalEngine):
    """The connection breaks after some bytes of the answer, as often as `cuts` has numbers."""

    def __init__(self, host: Host, cuts: list[int]) -> None:
        super().__init__(host)
        self.cuts = cuts

    def run(self, argv: Sequence[str], *, on_stdout: Any = None, **rest: Any) -> Completed:
        left = self.cuts.pop() if self.cuts else None
        if left is None:
            return super().run(argv, on_stdout=on_stdout, **rest)
        taken = 0

        def feed(data: bytes) -> None:
            nonlocal taken
            on_stdout(data[: max(left - taken, 0)])
            taken += len(data)

        super().run(argv, on_stdout=feed, **rest)
        raise Unreachable("the connection broke")


def test_a_followed_log_is_whole_after_many_cuts(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflashctl.logs.reading.FOLLOW_S", 0.3)
    rng = random.Random(7)
    text = bytes(rng.randrange(256) for _ in range(900_000))
    program = f"""
import random, sys, time
rng = random.Random(7)
text = bytes(rng.randrange(256) for _ in range({len(text)}))
for start in range(0, len(text), 60_000):
    sys.stdout.buffer.write(text[start:start + 60_000])
    sys.stdout.flush()
    time.sleep(0.1)
"""
    box.python(program)
    cuts = [rng.randrange(400_000) for _ in range(12)]
    engines: list[Cut] = []

    def connect(target: Host) -> Cut:
        engines.append(Cut(target, cuts))
        return engines[-1]

    got, notices = bytearray(), []
    source = Source(on_data=got.extend, on_notice=notices.append)
    pauses: list[float] = []
    while True:  # the very first contact may be the one that breaks: then the person asks again
        try:
            read(local_host(box), source, tag="t", follow=True, connect=connect, sleep=pauses.append)
            break
        except Unreachable:
            assert not got
    assert bytes(got) == text
    assert not cuts and len(engines) >= 10
    assert "no contact (the connection broke); trying again" in notices


def test_each_reason_for_lost_contact_is_told_once(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that was frozen for its backup and is then stopped: the second was never told."""
    reasons = ["is frozen", "is frozen", "is not running", "is frozen", "is not running"]

    def call(*args: Any, on_event: Any, **more: Any) -> dict[str, Any]:
        if len(reasons) in (5, 0):  # at first, and at last
            on_event({"run": {"id": "20260102T030405678-0a1b2c"}})
            if not reasons:
                return {"done": True}
        raise ContainerDown(f"container 200 {reasons.pop(0)}")

    monkeypatch.setattr("dflashctl.logs.reading.call", call)
    notices: list[str] = []
    read(local_host(box), Source(on_notice=notices.append), tag="t", follow=True, sleep=lambda s: None)
    assert notices == [
        "no contact (container 200 is frozen); trying again",
        "no contact (container 200 is not running); trying again",
        "in contact again",
    ]


@pytest.mark.parametrize(
    ("events", "seed"),
    [(30, 11), *(pytest.param(100, seed, marks=pytest.mark.soak) for seed in range(4))],
)
def test_cuts_stalls_truncations_and_rotations_lose_and_repeat_nothing(
    events: int, seed: int, box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's writer truncates (same inode, often grown past the old place) and rotates only what was read:
    what nobody read before it was cut is gone for everybody."""
    monkeypatch.setattr("dflashctl.logs.reading.FOLLOW_S", 0.4)
    log = Path(box.python("import time; time.sleep(600)")["log"])
    rng = random.Random(seed)
    wanted, got = bytearray(), bytearray()
    cuts: list[int] = []
    problems: list[BaseException] = []

    def follow() -> None:
        source = Source(on_data=got.extend)
        connect = lambda target: Cut(target, cuts)  # noqa: E731
        try:
            read(local_host(box), source, tag="t", follow=True, connect=connect, sleep=lambda seconds: None)
        except BaseException as error:
            problems.append(error)

    def caught_up() -> None:
        end = time.monotonic() + 30
        while bytes(got) != bytes(wanted):
            assert time.monotonic() < end and not problems, (len(got), len(wanted), problems)
            time.sleep(0.01)

    thread = threading.Thread(target=follow)
    thread.start()
    piece = b"the first\n"
    for event in range(events):
        wanted.extend(piece)
        with log.open("ab") as file:
            file.write(piece)
        kind = rng.choice(["cut", "stall", "truncate", "rotate"])
        piece = rng.randbytes(rng.choice([1, 50, 3000, 70_000]))
        if kind == "cut":
            cuts.append(rng.randrange(100_000))
        elif kind == "stall":
            time.sleep(rng.uniform(0, 0.1))
        else:
            caught_up()
            if kind == "rotate":
                log.rename(log.with_name(f"train_t.log.{event}"))
            else:
                log.write_bytes(b"")  # what follows may be longer than what was
    caught_up()
    box.stop("t")
    thread.join(30)
    assert not thread.is_alive() and problems == []
    assert bytes(got) == bytes(wanted)


def test_without_following_lost_contact_is_an_error(box: Any) -> None:
    ended(box, b"x\n")
    with pytest.raises(Unreachable):
        read(local_host(box), Source(), tag="t", connect=lambda target: Cut(target, [10]))


def test_an_unknown_tag_is_not_found(box: Any) -> None:
    ended(box, b"x\n")
    with pytest.raises(NotFound, match="no run has the tag 'u'; the newest tags are t"):
        read(local_host(box), Source(), tag="u")


def test_a_writer_that_never_rests_is_not_chased(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def answer(engine: Any, op: str, request: dict[str, Any], **rest: Any) -> dict[str, Any]:
        asked.append(request)
        here = len(asked) * 100
        return {"id": "x", "inode": 1, "offset": here, "size": 250 + 1000 * len(asked) - 1000, "done": False}

    monkeypatch.setattr("dflashctl.logs.reading.call", answer)
    read(local_host(box), Source(), tag="t")
    assert [each["offset"] for each in asked] == [None, 100, 200]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aé日\n\r", max_size=60), st.integers(0, 2**32))
def test_lines_do_not_depend_on_how_the_bytes_were_cut(text: str, seed: int) -> None:
    data, rng = text.encode(), random.Random(seed)
    whole, pieces = Lines(), Lines()
    expected = [*whole.feed(data), *whole.feed(b"", last=True)]
    got: list[str] = []
    while data:
        size = rng.randint(1, 5)
        got += pieces.feed(data[:size])
        data = data[size:]
    got += pieces.feed(b"", last=True)
    assert got == expected


def test_progress_is_one_live_line() -> None:
    lines = Lines()
    assert list(lines.feed(b"start\n10%\r20%")) == ["start"]
    assert lines.live == "20%"
    assert list(lines.feed(b"\r30%\r")) == []
    assert lines.live == "30%\r"
    assert list(lines.feed(b"\nend\n")) == ["30%", "end"]
    assert overwritten("abc\r") == "abc"


def test_bytes_that_are_no_text_are_shown_as_escapes() -> None:
    lines = Lines()
    assert list(lines.feed(b"a\xff\xe6\x97\n")) == ["a\\xff\\xe6\\x97"]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    lines = Lines()
    shown = [each for _ in range(40) for each in lines.feed(b"y" * 10_000)]
    assert [len(each) for each in shown] == [MAX_LINE_CHARS] * 6
    assert len(lines.live) == 400_000 - 6 * MAX_LINE_CHARS
