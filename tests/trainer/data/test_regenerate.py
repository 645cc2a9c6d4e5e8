"""`regenerate`: answers by the target here or by a server; accounting, retries, interruption at any point.

Run: python -m pytest tests/trainer/data/test_regenerate.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, completion, said
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from trainer.cli import app
from trainer.data import records
from trainer.data.journal import Counts
from trainer.data.journal import Result as RowResult
from trainer.data.regenerate import Answer, Job, Refused, Sampling, job, regenerate, report, row_seed
from trainer.data.server import Gone, Server, ServerSettings, _seconds
from trainer.errors import ConfigError, TrainerError

OLD = {"role": "assistant", "content": "an old answer"}


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def source(path: Path, count: int = 12) -> Path:
    """Conversations of one to three turns, and rows that cannot be asked."""
    rows: list[Any] = []
    for number in range(count):
        turns = [part for turn in range(1 + number % 3) for part in (ask(f"q{number}.{turn}"), OLD)]
        system = [{"role": "system", "content": "Be kind."}] if number % 2 else []
        rows.append({"id": f"r{number}", "messages": [*system, *turns]})
    rows[3:3] = ["not json", {"text": "no conversation"}]
    rows.append({"conversations": [{"from": "human", "value": "no answer yet"}]})
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the test server makes of a conversation's questions."""
    done: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        done.append(message)
        if message["role"] == "user":
            done.append({"role": "assistant", "content": said(done)})
    return done


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(lambda number, body: None).running() as running:
        yield running


def go(path: Path, out: Path, server: ChatServer, say: Any = lambda text: None, **options: Any) -> Counts:
    given = {"first_wait_s": 0.001, "concurrency": 4, **options}
    sampling = given.pop("sampling", Sampling())
    answering = Server(ServerSettings(server.url, "m", **given), sampling).answering()
    return regenerate(path, out, {"model": "m"}, 1, answering, say)


def test_every_answer_is_new_and_follows_the_new_ones_before_it(tmp_path: Path, server: ChatServer) -> None:
    path = source(tmp_path / "in.jsonl")
    counts = go(path, tmp_path / "out.jsonl", server)
    assert (counts.success, counts.failed, counts.skipped) == (13, 0, 2)
    rows = read(tmp_path / "out.jsonl")
    old = [row for row in map(_object, path.read_text().splitlines()) if row and "text" not in row]
    wanted = [answered(row.get("messages", [ask("no answer yet")])) for row in old]
    assert [row["messages"] for row in rows] == wanted
    assert [row.get("id") for row in rows] == [row.get("id") for row in old]
    assert "an old answer" not in (tmp_path / "out.jsonl").read_text()
    for row in rows:  # and prepare reads them
        assert isinstance(records.read(row), records.Conversation)
    failed = read(tmp_path / "out.jsonl.failed")
    assert [row["regenerate"]["status"] for row in failed] == ["skipped", "skipped"]
    assert failed[0]["regenerate"]["from"] == f"{path}:4" and "not JSON" in failed[0]["regenerate"]["reason"]
    assert failed[1]["text"] == "no conversation"
    assert counts.tokens == 5 * sum(len([m for m in row["messages"] if m["role"] == "user"]) for row in rows)
    assert not (tmp_path / "out.jsonl.partial").exists()
    assert server.requests[0]["path"] == "/v1/chat/completions" and server.most_at_once <= 4


def test_as_many_requests_at_once_as_allowed(tmp_path: Path, server: ChatServer) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"messages": [ask(f"q{number}")]}) + "\n" for number in range(12)))
    together = threading.Barrier(4)

    def fault(number: int, body: dict[str, Any]) -> None:
        together.wait(timeout=60)  # nobody is answered before four have asked

    server.fault = fault
    assert go(path, tmp_path / "out.jsonl", server, concurrency=4, tries=1).success == 12
    assert server.most_at_once == 4


def _object(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def test_the_request_says_how_to_sample_and_in_which_mode(tmp_path: Path, server: ChatServer) -> None:
    path = tmp_path / "in.jsonl"
    thought = {**OLD, "reasoning_content": "hm"}
    path.write_text(json.dumps({"messages": [ask("a"), thought, ask("b")], "tools": [{"name": "f"}]}) + "\n")
    sampling = Sampling(0.6, top_p=0.95, top_k=20, max_new_tokens=77, seed=5)
    go(path, tmp_path / "out.jsonl", server, sampling=sampling, thinking=False, arguments={"x": 1})
    first, second = server.requests
    known = {"model": "m", "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 77}
    assert first.items() >= known.items() and first["tools"] == [{"name": "f"}]
    assert first["chat_template_kwargs"] == {"x": 1, "enable_thinking": False}
    assert first["seed"] != second["seed"] and 0 <= first["seed"] < 2**31  # each answer has its own
    go(path, tmp_path / "plain.jsonl", server)
    assert not {"top_p", "top_k", "chat_template_kwargs"} & server.requests[-1].keys()
    assert not any("authorization" in headers for headers in server.headers)


def test_thoughts_come_back_as_thoughts(tmp_path: Path, server: ChatServer) -> None:
    server.fault = lambda number, body: (200, {}, completion("Two.", reasoning_content="One and one."))
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": [ask("1+1?"), OLD, ask("Sure?")]}) + "\n")
    go(path, tmp_path / "out.jsonl", server)
    (row,) = read(tmp_path / "out.jsonl")
    assert row["messages"][1] == {"role": "assistant", "content": "Two.", "reasoning_content": "One and one."}
    assert server.requests[1]["messages"][1] == row["messages"][1]


def flaky(number: int, body: dict[str, Any]) -> Any:
    """Two of three requests come to nothing."""
    faults = [
        (429, {"retry-after": "0"}, {}), (503, {}, b"busy"), None, "drop", (500, {"retry-after": "soon"}, {}),
        None, (200, {}, b"<html>"), (200, {}, {"choices": []}), None,
    ]  # fmt: skip
    return faults[number % len(faults)]


def test_what_passes_by_itself_is_tried_again(tmp_path: Path, server: ChatServer) -> None:
    path = source(tmp_path / "in.jsonl")
    go(path, tmp_path / "calm.jsonl", server)
    server.fault = flaky
    counts = go(path, tmp_path / "flaky.jsonl", server, tries=40, concurrency=1)
    assert counts.success == 13 and not counts.failed
    assert (tmp_path / "flaky.jsonl").read_bytes() == (tmp_path / "calm.jsonl").read_bytes()


def test_waits_grow_and_the_servers_own_word_counts() -> None:
    server = Server(ServerSettings("http://x/v1", "m", first_wait_s=0.5), Sampling())
    waits = [server._wait(attempt) for attempt in range(12)]
    for attempt, wait in enumerate(waits):
        middle = min(60, 0.5 * 2**attempt)
        assert 0.5 * middle <= wait <= 1.5 * middle
    assert [_seconds(text) for text in ("3", "0.5", "-1", "inf", "nan", "Wed, 21 Oct", None)] == [
        3.0, 0.5, None, None, None, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        (
            (400, {}, {"error": {"message": "too long:\n 9000 tokens"}}),
            "failed",
            "HTTP 400 too long: 9000 tokens",
        ),
        ((422, {}, b"what?"), "failed", "HTTP 422 what?"),
        ((500, {}, {}), "failed", "HTTP 500 at each of 2 tries"),
        ((200, {}, b"<html>"), "failed", "the answer is not a chat completion at each of 2 tries"),
        ((200, {}, completion("cut", "length")), "skipped", "cut off before its end"),
        ((200, {}, completion("", "tool_calls")), "skipped", "ended by tool_calls"),
        ((200, {}, completion("")), "skipped", "the target says nothing"),
        ((200, {}, completion(None)), "skipped", "the target says nothing"),
        ((200, {}, completion("a\ud800")), "failed", "half a surrogate pair"),
    ],
)
def test_what_concerns_one_row_fails_that_row(
    fault: Any, status: str, reason: str, tmp_path: Path, server: ChatServer
) -> None:
    server.fault = lambda number, body: fault if "q1.0" in json.dumps(body) else None
    counts = go(source(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl", server, tries=2)
    assert counts.success == 3 and counts.failed == (status == "failed")
    last = read(tmp_path / "out.jsonl.failed")[0]
    assert last["regenerate"]["status"] == status and reason in last["regenerate"]["reason"]
    assert last["id"] == "r1" and last["messages"][-1] == OLD  # as it was, to be tried again
    # What failed is an input of its own.
    server.fault = lambda number, body: None
    go(tmp_path / "out.jsonl.failed", tmp_path / "again.jsonl", server)
    assert [row["id"] for row in read(tmp_path / "again.jsonl")] == ["r1"]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_concerns_all_rows_ends_the_run(status: int, tmp_path: Path, server: ChatServer) -> None:
    server.fault = lambda number, body: (status, {}, {"error": "no\x1b[2J"}) if number >= 4 else None
    with pytest.raises(ConfigError, match=f"HTTP {status} no") as caught:
        go(source(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", server)
    assert "--key-env" in caught.value.next and "\x1b" not in str(caught.value)
    server.fault = lambda number, body: None
    assert go(tmp_path / "in.jsonl", tmp_path / "out.jsonl", server).success == 13


def test_a_server_that_goes_ends_the_run_and_it_goes_on_later(tmp_path: Path, server: ChatServer) -> None:
    path = source(tmp_path / "in.jsonl")
    go(path, tmp_path / "whole.jsonl", server)
    server.requests.clear()
    server.fault = lambda number, body: "drop" if number >= 9 else None
    with pytest.raises(Gone, match="no answer after 2 tries") as caught:
        go(path, tmp_path / "out.jsonl", server, tries=2)
    assert "goes on from here" in caught.value.next
    server.fault = lambda number, body: None
    heard: list[str] = []
    go(path, tmp_path / "out.jsonl", server, heard.append)
    assert heard and heard[0].startswith("going on after ")
    for name in ("", ".failed"):
        assert (tmp_path / f"out.jsonl{name}").read_bytes() == (tmp_path / f"whole.jsonl{name}").read_bytes()
    nobody = Server(ServerSettings("http://127.0.0.1:9/v1", "m", tries=2, first_wait_s=0.001), Sampling())
    with pytest.raises(Gone, match="ConnectError"):
        regenerate(path, tmp_path / "none.jsonl", {}, 1, nobody.answering(), lambda text: None)


def by_rule(rows: Iterator[Job | RowResult], told: Any) -> Iterator[RowResult]:
    """Answers without any target."""
    for each in rows:
        if isinstance(each, Job):
            while (prompt := each.next_prompt()) is not None:
                each.answered(Answer(said(prompt), 3))
            each = each.result()
        yield each


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cuts=st.lists(st.integers(0, 3000), max_size=5), window=st.integers(1, 5))
def test_an_interrupted_regenerate_goes_on_to_the_same_files(
    cuts: list[int], window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever bytes reached the disk before the end came."""
    folder = tmp_path_factory.mktemp("r")
    path = source(folder / "in.jsonl", 20)
    whole, out = folder / "whole.jsonl", folder / "out.jsonl"
    regenerate(path, whole, {"a": 1}, 1, by_rule, lambda text: None)

    def all_but_finish(rows: Iterator[Job | RowResult], told: Any) -> Iterator[RowResult]:
        yield from by_rule(rows, told)
        raise KeyboardInterrupt

    for cut in cuts:
        with pytest.raises(KeyboardInterrupt):
            regenerate(path, out, {"a": 1}, window, all_but_finish, lambda text: None)
        journal = out.with_name("out.jsonl.partial")
        journal.write_bytes(journal.read_bytes()[: max(0, journal.stat().st_size - cut)])
    counts = regenerate(path, out, {"a": 1}, window, by_rule, lambda text: None)
    assert out.read_bytes() == whole.read_bytes() and counts.rows == 23
    assert (folder / "out.jsonl.failed").read_bytes() == (folder / "whole.jsonl.failed").read_bytes()


def test_a_killed_command_goes_on_to_the_same_file(tmp_path: Path, server: ChatServer) -> None:
    path = source(tmp_path / "in.jsonl", 40)
    go(path, tmp_path / "whole.jsonl", server)
    words = ["regenerate", path, "--out", tmp_path / "out.jsonl", "--server", server.url, "--model", "m"]
    words += ["--max-new-tokens", "64", "--concurrency", "3", "--key-env", "TEST_KEY"]
    command = [sys.executable, "-m", "trainer", *map(str, words)]
    environment = {**os.environ, "TEST_KEY": "quite-secret-7"}
    for sign, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        server.requests.clear()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        # The server stands still after some requests, so the command cannot be done when the signal comes.
        server.fault = lambda number, body: time.sleep(600) if number >= 15 else None
        end = time.monotonic() + 120
        while len(server.requests) < 16:
            assert time.monotonic() < end and process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(sign)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code and b"Traceback" not in errors, errors
    server.fault = lambda number, body: None
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0 and b"going on after" in done.stderr, done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert server.headers[-1]["authorization"] == "Bearer quite-secret-7"
    kept = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    assert b"quite-secret-7" not in kept + done.stdout + done.stderr + " ".join(command).encode()
    assert b"41 success, 0 failed, 2 skipped" in done.stdout


def command(*words: Any) -> Result:
    return CliRunner().invoke(app, ["regenerate", *map(str, words)])


def test_wrong_words_are_said(tmp_path: Path, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    path = source(tmp_path / "in.jsonl", 2)
    out = tmp_path / "out.jsonl"
    for words, problem in (
        ((path, "--out", out), "one of --target and --server is needed"),
        ((path, "--out", out, "--server", server.url, "--target", tmp_path), "one of --target and --server"),
        ((path, "--out", out, "--server", server.url), "--model: needed with --server"),
        (
            (path, "--out", out, "--server", "box:80", "--model", "m"),
            "does not begin with http:// or https://",
        ),
        (
            (path, "--out", out, "--server", server.url, "--model", "m", "--key-env", "NO_SUCH_KEY"),
            "--key-env NO_SUCH_KEY: is not set in the environment",
        ),
        ((path, "--out", out, "--target", tmp_path / "none"), "--target"),
        ((tmp_path / "none", "--out", out, "--server", server.url, "--model", "m"), "none: no such file"),
    ):
        done = command(*words)
        assert done.exit_code == 2 and problem in done.stderr, done.output
    words = (path, "--out", out, "--server", server.url, "--model", "m")
    assert command(*words).exit_code == 0
    done = command(*words)
    assert done.exit_code == 2 and f"{out}: is there already" in done.stderr


def test_a_row_that_is_no_text_is_skipped_and_kept_as_it_was(tmp_path: Path, server: ChatServer) -> None:
    """Half a surrogate pair is JSON and no UTF-8: it was a traceback."""
    path = tmp_path / "in.jsonl"
    rows = [{"messages": [ask("q\ud800")]}, {"messages": [ask("q")]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = go(path, tmp_path / "out.jsonl", server)
    assert (counts.success, counts.skipped) == (1, 1)
    (kept,) = read(tmp_path / "out.jsonl.failed")
    assert kept["messages"] == rows[0]["messages"] and "half a surrogate pair" in kept["regenerate"]["reason"]


def test_rows_that_cannot_be_asked_are_skipped_with_the_reason() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    for row, reason in (
        ({"messages": [ask("x"), call]}, "calls tools"),
        ({"messages": [OLD]}, "asks nothing"),
        ({"messages": []}, "the conversation is empty"),
        ({"input_ids": [1], "loss_mask": [1]}, "no conversation"),
    ):
        with pytest.raises(Refused, match=reason) as caught:
            job(1, row)
        assert caught.value.status == "skipped"
    several = job(1, {"messages": [ask("a"), ask("b"), OLD, OLD, ask("c")]})
    assert [[m["content"] for m in ahead] for ahead in several.ahead] == [["a", "b"], ["c"]]


def test_every_answer_has_a_seed_of_its_own() -> None:
    rows = [job(line, {"messages": [ask("a"), OLD, ask("b")]}) for line in range(50)]
    seeds = [row_seed(seed, row) for seed in (0, 1) for row in rows]
    assert len(set(seeds)) == 100 and seeds == [row_seed(seed, row) for seed in (0, 1) for row in rows]


def test_the_report_names_what_went_wrong_most() -> None:
    counts = Counts()
    chance = random.Random(0)
    for number in range(30):
        reason = chance.choice(["rare", "often", "often"])
        counts.add(
            RowResult(number, "failed" if number < 20 else "success", None, reason if number < 20 else "", 2)
        )
    said_lines = report(counts, Path("out.jsonl"))
    assert said_lines[0] == "30 rows: 10 success, 20 failed, 0 skipped; 60 tokens written"
    assert said_lines[1].endswith(" times: often") and said_lines[-1] == "out.jsonl"


def test_without_the_clients_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.server.httpx2", None)
    with pytest.raises(TrainerError, match="-m pip install httpx2"):
        Server(ServerSettings("http://x/v1", "m"), Sampling())
