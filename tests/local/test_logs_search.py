"""Run with: pytest tests/local/test_logs_search.py. `logs --grep`, `--errors`, `--since`, done over there."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.agent import AgentError
from dflashctl.agent.logs import logindex, logread, logsearch
from dflashctl.cli.main import run
from dflashctl.runs import known

TRACE = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
ValueError: bad \x1b[2J tap
"""


class Got:
    """An `emit` that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.batches = 0

    def __call__(self, event: dict[str, Any]) -> None:
        self.batches += "lines" in event
        self.lines += [(number, text) for number, text in event.get("lines", [])]


def ended(box: Any, text: bytes, tag: str = "t") -> Any:
    answer = box.python("pass", tag)
    box.wait(answer)
    Path(answer["log"]).write_bytes(text)
    return answer


def ask(box: Any, **request: Any) -> tuple[list[tuple[int, str]], dict[str, Any]]:
    got = Got()
    request = {"state_dir": box.state_dir, "tag": "t", "known": known.patterns(), **request}
    answer = logsearch.search_log(request, got)
    return got.lines, answer


def test_a_pattern_that_takes_for_ever_ends_with_who_asked(box: Any) -> None:
    """It went on for ten minutes beside the training after Ctrl-C; to who waits it tells that it works."""

    class Waits(Got):
        gone = False
        told = 0

        def __call__(self, event: dict[str, Any]) -> None:
            super().__call__(event)
            self.told += "searched" in event
            self.gone = self.told == 2

    ended(box, b"a" * 100 + b"!\n")
    waits = Waits()
    with pytest.raises(AgentError, match="nobody waits"):
        logsearch.search_log({"state_dir": box.state_dir, "tag": "t", "grep": "(a+)+$"}, waits)
    assert waits.told == 2 and waits.lines == []


@pytest.fixture
def cli(box: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Callable[..., Any]:
    hosts = tmp_path / "hosts.yaml"
    entry = f"{{engine: local, python: {sys.executable}, state_dir: {box.state_dir}}}"
    hosts.write_text(f"version: 1\ndefaults: {{host: here}}\nhosts:\n  here: {entry}\n")
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(hosts))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["logs", *words])
        return (code, *capfd.readouterr())

    return call


def test_grep_gives_numbers_and_lines(box: Any, cli: Callable[..., Any]) -> None:
    ended(box, b"step 1\nloss NaN\nstep 2\n  5%\r 10% nan\r 20%\nend \x1b[2J nan\n")
    assert cli("t", "--grep", "NaN")[:2] == (0, "2: loss NaN\n")
    assert cli("t", "--grep", "nan", "-i", "-n", "2")[1] == "4:  10% nan\n5: end \\x1b[2J nan\n"
    assert cli("t", "--grep", "nan", "-i", "-n", "2")[2] == "2 of 3 matches shown\n"
    code, out, err = cli("t", "--grep", "never")
    assert (code, out, err) == (0, "", "no line of the log matches\n")
    document = json.loads(cli("t", "--grep", "step", "--json")[1])
    assert document["schema"] == "dflashctl.logs/1" and document["matches"] == 2
    assert document["found"] == [{"line": 1, "text": "step 1"}, {"line": 3, "text": "step 2"}]


def test_errors_are_whole_tracebacks_and_known_failures(box: Any, cli: Callable[..., Any]) -> None:
    text = "step 1\n" + TRACE + "step 2\nCUDA out of memory. Tried\nstep 3\n" + TRACE
    ended(box, text.encode())
    code, out, _ = cli("t", "--errors")
    assert code == 0
    numbers = [int(line.split(":")[0]) for line in out.splitlines()]
    assert numbers == [2, 3, 4, 5, 7, 9, 10, 11, 12]
    assert "5: ValueError: bad \\x1b[2J tap" in out and "\x1b" not in out
    ended(box, b"all is well, no error: nothing\n")
    assert cli("t", "--errors")[2] == "no line of the log tells of trouble\n"


@pytest.mark.parametrize(
    ("prefix", "message", "after"),
    [
        (
            "[rank0]: ",
            ["DistBackendError: NCCL error", "Last error:", "Cuda failure 999"],
            "[rank0]: step 2",
        ),
        ("", ["DistBackendError: NCCL error", "Last error:", "Cuda failure 999"], "step 2"),
        ("", ["AcceleratorError: CUDA error", "CUDA kernel errors might be reported late."], "step 2"),
        ("", ["Unsupported: Graph break", "  Explanation: x", "", "  Hint: y"], "step 2"),
        ("", ["ValueError: x"], " 5% of an epoch"),
        ("", ["ValueError: x", "", "The above exception was the direct cause of the following"], "step 2"),
    ],
)
def test_a_message_of_several_lines_is_whole(
    prefix: str, message: list[str], after: str, box: Any, cli: Callable[..., Any]
) -> None:
    trace = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    f()", *message]
    lines = [prefix + each for each in trace]
    ended(box, "\n".join(["step 1", *lines, after, "step 3"]).encode())
    wanted = [f"{number}: {each}" for number, each in enumerate(lines, 2) if each.strip()]
    assert [each for each in cli("t", "--errors")[1].splitlines() if not each.endswith(": ")] == wanted


@pytest.mark.parametrize("before", ["", "step 1\n", "step 1\n" + TRACE])
def test_errors_are_also_the_messages_of_a_program_that_shows_no_traceback(
    box: Any, cli: Callable[..., Any], before: str
) -> None:
    ended(
        box,
        before.encode()
        + b"error: a.yaml:3: no such key\n  nor this\nnext: write b\nnext: step 2\nend\nerror: x",
    )
    first = before.count("\n") + 1
    lines = cli("t", "--errors")[1].splitlines()[-5:]
    texts = ["error: a.yaml:3: no such key", "  nor this", "next: write b", "next: step 2", "error: x"]
    assert lines == [f"{first + more}: {text}" for more, text in zip((0, 1, 2, 3, 5), texts, strict=True)]


def test_an_empty_log_is_said_to_be_empty_beside_stdout(box: Any, cli: Callable[..., Any]) -> None:
    ended(box, b"")
    assert cli("t") == (0, "", "the log is empty so far\n")
    assert json.loads(cli("t", "--json")[1])["lines"] == []
    ended(box, b"x\n")
    assert cli("t") == (0, "x\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grep", "("], "error: --grep: '(' is not a regular expression: missing )"),
        (["--grep", "x", "--errors"], "either --grep or --errors"),
        (["--grep", "x", "-f"], "a search does not follow"),
        (["--since", "soon"], "--since: not a length of time: 'soon'"),
    ],
)
def test_wrong_wishes_are_usage_errors(
    box: Any, cli: Callable[..., Any], words: list[str], said: str
) -> None:
    ended(box, b"x\n")
    code, out, err = cli("t", *words)
    assert (code, out) == (2, "")
    assert said in err


def test_an_unknown_tag_exits_with_6(box: Any, cli: Callable[..., Any]) -> None:
    ended(box, b"x\n")
    assert cli("u", "--grep", "x")[0] == 6


PATTERNS = ["a", "^a", "b$", "a.*b", r"\s", r"a\sb", "[^a]b", "x|b", "", "^$", r"\d+"]
TEXTS = st.lists(st.text(alphabet="ab x1", max_size=6), max_size=12)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(PATTERNS), st.booleans())
def test_a_block_gives_what_a_search_line_by_line_gives(lines: list[str], pattern: str, end: bool) -> None:
    data = ("\n".join(lines) + ("\n" if end and lines else "")).encode()
    split = data.split(b"\n")
    if split[-1] == b"":
        split = split[:-1]
    compiled = re.compile(pattern.encode(), re.M)
    wanted = [(number, line) for number, line in enumerate(split) if compiled.search(line)]
    found = [(before, data[begin:stop]) for begin, stop, before in logsearch.lines_in(data, compiled)]
    assert found == wanted


def test_many_matches_come_in_batches_and_are_bounded(box: Any) -> None:
    ended(box, b"match\n" * 25_000)
    lines, answer = ask(box, grep="match")
    assert (answer["matches"], answer["sent"], len(lines)) == (25_000, logsearch.MOST, logsearch.MOST)
    lines, answer = ask(box, grep="match", last=3)
    assert [number for number, _ in lines] == [24_998, 24_999, 25_000]


def test_a_traceback_across_blocks_is_whole(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logsearch, "BLOCK_BYTES", 100)
    ended(box, b"x" * 60 + b"\n" + TRACE.encode() + b"y\n")
    assert [number for number, _ in ask(box, errors=True)[0]] == [2, 3, 4, 5]


def test_a_hundred_megabytes_are_searched_in_seconds(box: Any) -> None:
    """1 GB in about 5 s on an idle machine; four times that fails here."""
    answer = ended(box, b"")
    block = b"".join(b"step %d loss 2.3117 lr 1.0e-4 tokens/s 12034\n" % n for n in range(22_000))
    with Path(answer["log"]).open("wb") as file:
        for _ in range(100):
            file.write(block)
        file.write(b"needle\n")
    for request in ({"grep": "needle"}, {"errors": True}):
        before = time.process_time()
        lines, told = ask(box, **request)
        spent = time.process_time() - before
        assert told["matches"] == ("grep" in request)
        print(f"{request}: {told['size'] / 2**20 / spent:.0f} MiB/s")
        assert spent < 2.0 * told["size"] / 100e6
    assert lines == []


def test_since_starts_where_the_log_was_then(
    box: Any, until: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    answer = box.python("import time; print('early', flush=True); time.sleep(600)")
    until(lambda: "early" in box.log(answer))
    folder, log = box.run(answer), Path(answer["log"])
    until(lambda: Path(folder.file("log_index.jsonl")).exists())
    assert json.loads(Path(folder.file("log_index.jsonl")).read_text().splitlines()[0])["version"] == 1
    with Path(folder.file("log_index.jsonl")).open("w") as file:
        for at, size in ((time.time() - 600, 3), (time.time() - 300, 6)):
            file.write(json.dumps({"at": at, "inode": log.stat().st_ino, "size": size}) + "\n")
        file.write('{"at": 1, "si')
    with log.open("a") as file:
        file.write("late\n")
    assert cli("t", "--since", "5m10s")[1] == "ly\nlate\n"
    assert cli("t", "--since", "60s")[1] == "late\n"
    assert cli("t", "--since", "1d")[1] == "early\nlate\n"
    assert cli("t", "--since", "60s", "--grep", "l")[1] == "2: late\n"
    Path(folder.file("log_index.jsonl")).unlink()
    code, out, err = cli("t", "--since", "60s")
    assert (code, out) == (0, "early\nlate\n")
    assert "when its lines were written is not known" in err


def test_the_index_of_a_replaced_log_does_not_lie(box: Any) -> None:
    answer = ended(box, b"new file\n")
    run_folder = box.run(answer)
    entry = {"at": time.time() - 100, "inode": 1, "size": 4}
    Path(run_folder.file("log_index.jsonl")).write_text(json.dumps(entry) + "\n")
    assert logindex.offset_at(run_folder, 2, time.time()) == 0
    assert logindex.offset_at(run_folder, 1, time.time()) == 4
    assert logindex.offset_at(run_folder, 1, time.time() - 200) == 0


def test_the_supervisor_keeps_the_index_small(box: Any, tmp_path: Path, monkeypatch: Any) -> None:
    run_folder = box.run(ended(box, b""))
    log = tmp_path / "log"
    log.write_bytes(b"x")
    index = logindex.LogIndex(run_folder, str(log))
    path = Path(run_folder.file("log_index.jsonl"))
    path.unlink(missing_ok=True)
    monkeypatch.setattr(logindex, "EVERY_S", 0.05)
    for size in (1, 1, 1, 5):
        log.write_bytes(b"x" * size)
        index.look()
        index.look()
        time.sleep(0.06)
    assert [json.loads(line)["size"] for line in path.read_text().splitlines()] == [1, 5]
    log.unlink()
    index.look()


def test_the_reader_and_the_search_begin_alike(box: Any) -> None:
    answer = ended(box, b"one\ntwo\n")
    entry = {"at": time.time() - 100, "inode": Path(answer["log"]).stat().st_ino, "size": 4}
    Path(box.run(answer).file("log_index.jsonl")).write_text(json.dumps(entry) + "\n")
    got: list[dict[str, Any]] = []
    logread.read_log({"state_dir": box.state_dir, "tag": "t", "since_s": 50}, got.append)
    assert [each["offset"] for each in got if "data" in each] == [8]
    assert ask(box, grep="o", since_s=50)[0] == [(2, "two")]
