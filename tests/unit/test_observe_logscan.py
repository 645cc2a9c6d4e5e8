"""Run with: pytest tests/unit/test_observe_logscan.py. Trouble in a log, found in one scan or in many."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.agent.logs import logknown, logscan
from dflashctl.runs import known

ROWS = [logknown.Known(row) for row in known.patterns()]
STEP = re.compile(rb"step (?P<step>\d+)")

TLS = """\
Exception in thread drafter-1:
Traceback (most recent call last):
  File "/root/dflash/current/trainer/drafter.py", line 50, in run
    out = self.forward(batch)
  File "/root/venv/lib/python3.12/site-packages/torch/_inductor/cudagraph_trees.py", line 326, in get_obj
    assert torch._C._is_key_in_tls(attr_name)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError
"""

CHAIN = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    {}["x"]
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise RuntimeError("no x") from None
RuntimeError: no x
"""

TOGETHER = """\
Exception in thread drafter2:
Traceback (most recent call last):
  File "a.py", line 6, in d
Exception in thread Exception in thread drafter0:
    self.run()
drafter1Traceback (most recent call last):
    :
self._target(*self._args, **self._kwargs)
  File "a.py", line 6, in d
INFO: step 7 of 9
Traceback (most recent call last):
  File "a.py", line 6, in d
AssertionErrorraise AssertionError("assert torch._C._is_key_in_tls(attr_name)")
: AssertionErrorassert torch._C._is_key_in_tls(attr_name)
: assert torch._C._is_key_in_tls(attr_name)
    raise AssertionError("assert torch._C._is_key_in_tls(attr_name)")
AssertionError: assert torch._C._is_key_in_tls(attr_name)
"""
"""Three threads that fail at the same moment, as Python writes them: in pieces of lines."""


def scan(tmp_path: Path, text: str | bytes, start: int = 0, **more: Any) -> dict[str, Any]:
    path = tmp_path / "log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return logscan.scan(str(path), start, ROWS, step=STEP, **more)


def test_a_bare_assertion_is_shown_with_its_source_line(tmp_path: Path) -> None:
    found = scan(tmp_path, "step 1\n" * 200 + TLS)
    assert found["exceptions"] == 1
    assert found["first_exception"] == {
        "line": 208,
        "text": "AssertionError … assert torch._C._is_key_in_tls(attr_name)",
    }
    assert found["known"]["cudagraph-trees-tls"]["line"] == 206
    assert found["step"] == 1


def test_exceptions_are_counted_and_chains_count_once(tmp_path: Path) -> None:
    found = scan(tmp_path, TLS * 3 + CHAIN + TLS * 2)
    assert found["exceptions"] == 6
    assert found["known"]["cudagraph-trees-tls"]["count"] == 5


def test_what_an_earlier_run_left_in_the_file_is_not_counted_but_its_lines_are(tmp_path: Path) -> None:
    found = scan(tmp_path, TLS + "fresh\n" + CHAIN, start=len(TLS.encode()))
    assert found["exceptions"] == 1
    assert found["known"] == {}
    assert found["first_exception"] == {"line": 13, "text": "KeyError: 'x'"}


def test_a_prefix_of_a_launcher_is_followed_through_other_writers(tmp_path: Path) -> None:
    text = (
        "[rank1]: Traceback (most recent call last):\n"
        "[rank0]: step 3\n"
        '[rank1]:   File "x.py", line 3, in f\n'
        "[rank0]: step 4\n"
        "[rank1]: ValueError: anchors start past the row\n"
    )
    assert scan(tmp_path, text)["first_exception"] == {
        "line": 5,
        "text": "ValueError: anchors start past the row",
    }


def test_a_traceback_still_being_written_is_counted_and_completed_later(tmp_path: Path) -> None:
    cut = TLS.index("    assert")
    first = scan(tmp_path, TLS[:cut])
    assert (first["exceptions"], first["first_exception"]["line"]) == (1, 2)
    second = scan(tmp_path, TLS, resume=first["resume"])
    assert second["exceptions"] == 1
    assert second["first_exception"]["text"].startswith("AssertionError … assert")


def test_threads_that_fail_together_are_told_by_an_exception_and_not_by_the_next_threads_header(
    tmp_path: Path,
) -> None:
    found = scan(tmp_path, TOGETHER)
    assert found["exceptions"] == 3
    told = "AssertionError: assert torch._C._is_key_in_tls(attr_name)"
    assert found["first_exception"] == {"line": 17, "text": told}
    early = scan(tmp_path, TOGETHER[: TOGETHER.index("INFO")])
    assert early["first_exception"]["text"] == "self._target(*self._args, **self._kwargs)"
    assert scan(tmp_path, TOGETHER, resume=early["resume"])["first_exception"]["text"] == told


@pytest.mark.parametrize(
    "last",
    ["struct.error: unpack requires 4 bytes", "_queue.Empty", "a.f.<locals>.TooBad: x", "Stop", "stop: here"],
)
def test_a_traceback_ends_with_whatever_is_raised(tmp_path: Path, last: str) -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\n' + last + "\nstep 3\n"
    shown = scan(tmp_path, text)["first_exception"]
    assert (shown["line"], shown["text"].partition(" … ")[0]) == (4, last)


@pytest.mark.parametrize("kind", ["RuntimeError", "torch._dynamo.exc.Unsupported", "_Stop"])
def test_an_exception_whose_words_begin_on_the_next_line_is_one(tmp_path: Path, kind: str) -> None:
    """As multiprocessing's: what came later, and reads like one, was told in its place."""
    text = (
        f"Traceback (most recent call last):\n  f()\n{kind}: \n      An attempt has been made\n\nEpoch: 3\n"
    )
    assert scan(tmp_path, text)["first_exception"] == {"line": 3, "text": f"{kind}:"}


def test_the_middle_of_a_long_log_is_skipped_and_said_so(tmp_path: Path) -> None:
    filler = b"x" * 99 + b"\n"
    text = TLS.encode() + filler * 1000 + CHAIN.encode() + filler * 1000 + b"CUDA out of memory\nstep 77\n"
    found = scan(tmp_path, text, head_bytes=10_000, tail_bytes=10_000, block_bytes=10_000, budget_s=0)
    assert found["skipped_bytes"] == len(text) - 20_000
    assert found["exceptions"] == 1, "the chain lies in the part that was not read"
    assert found["known"]["cuda-oom"]["line"] == 8 + 2000 + 12
    assert found["step"] == 77


def test_with_time_the_middle_is_read_as_well(tmp_path: Path) -> None:
    filler = b"x" * 99 + b"\n"
    text = filler * 1000 + CHAIN.encode() + filler * 1000
    found = scan(tmp_path, text, head_bytes=10_000, tail_bytes=10_000, block_bytes=10_000, budget_s=60)
    assert found["skipped_bytes"] == 0
    assert found["first_exception"] == {"line": 1004, "text": "KeyError: 'x'"}


@pytest.mark.parametrize("block", [150, 333, 1000])
def test_blocks_of_any_size_find_the_same(tmp_path: Path, block: int) -> None:
    text = "step 1\n" + TLS + "10%\r20%\rCUDA out of memory\n" + CHAIN * 2 + "step 9\n" + TLS
    whole = scan(tmp_path, text)
    cut = scan(tmp_path, text, head_bytes=block, tail_bytes=block, block_bytes=block, budget_s=60)
    assert {**cut, "resume": None} == {**whole, "resume": None}


def test_a_known_line_counts_once_however_often_it_matches(tmp_path: Path) -> None:
    found = scan(tmp_path, "CUDA out of memory. CUDA out of memory\nCUDA out of memory\n")
    assert found["known"]["cuda-oom"]["count"] == 2


def test_a_full_dev_shm_is_no_full_disk(tmp_path: Path) -> None:
    found = scan(tmp_path, "RuntimeError: unable to write to file </torch_1>: No space left on device (28)\n")
    assert set(found["known"]) == {"shm-full"}


def test_hostile_bytes_stay_one_short_line(tmp_path: Path) -> None:
    line = b"\x1b[2J\xff progress\rCUDA out of memory " + b"y" * 5000
    text = scan(tmp_path, line)["known"]["cuda-oom"]["text"]
    assert text.startswith("CUDA out of memory yyy")
    assert len(text) <= logscan.TEXT_CHARS


def test_a_replaced_or_cut_file_is_scanned_anew(tmp_path: Path) -> None:
    first = scan(tmp_path, TLS * 4)
    assert scan(tmp_path, "step 5\n", resume=first["resume"])["exceptions"] == 0
    regrown = "step 6\n" + "x" * len(TLS) * 5 + "\n" + CHAIN
    assert scan(tmp_path, regrown, resume=first["resume"])["exceptions"] == 1, "cut, then past the old end"
    (tmp_path / "log").rename(tmp_path / "old")
    assert scan(tmp_path, TLS * 9, resume=first["resume"])["exceptions"] == 9


@pytest.mark.parametrize("text", [None, "", "step (?P<step>", 7])
def test_a_step_pattern_that_does_not_compile_is_none(text: Any) -> None:
    assert logscan.compile_step(text) is None


PIECES = st.lists(
    st.sampled_from([TLS, CHAIN, TOGETHER, "step 12\n", "CUDA out of memory\n", "a\rb\r\n", "no end"])
)


@settings(max_examples=60, deadline=None)
@given(PIECES, st.integers(0, 2**32))
def test_many_scans_find_what_one_finds(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    text = "".join(pieces).encode()
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3)) if text else []
    path, resume = folder / "log", None
    path.write_bytes(b"")
    for cut in [*cuts, len(text)]:
        with path.open("r+b") as file:
            file.write(text[:cut])
        resume = logscan.scan(str(path), 0, ROWS, step=STEP, resume=resume)["resume"]
    many = logscan.scan(str(path), 0, ROWS, step=STEP, resume=resume)
    one = logscan.scan(str(path), 0, ROWS, step=STEP)
    assert {key: many[key] for key in many if key != "resume"} == {
        key: one[key] for key in one if key != "resume"
    }


SHAPED = [
    "step 118 loss 2.31 12,034 tok/s",
    "  12%|███       | 12/100 [00:01<00:09]\r 13%|███       | 13/100",
    "ECC errors: 0 volatile, 1 aggregate",
    "kernel 79 and 9 of 31",
]
LINES = st.lists(st.sampled_from([*(row.example for row in known.table()), *SHAPED]) | st.text(max_size=40))


@settings(max_examples=200, deadline=None)
@given(LINES, LINES)
def test_the_fast_search_finds_what_each_row_finds(first: list[str], second: list[str]) -> None:
    """Line by line with each row's own pattern, against shapes and branches; the second call knows shapes."""
    matcher = logknown.Matcher(ROWS)
    for lines in (first, second):
        data = "\n".join(lines).encode()
        plain = [(row.name, line) for line in data.split(b"\n") for row in ROWS if row.finds(line)]
        found = [(row.name, data[begin:end]) for row, begin, end in matcher.lines(data)]
        assert sorted(found) == sorted(plain)


def test_digits_of_a_pattern_are_kept_where_they_count() -> None:
    row = logknown.Known({"name": "x", "pattern": r"Xid: (79|95)\b|exit -9 [1-3]|a\|b9", "unless": ""})
    matcher = logknown.Matcher([row])
    data = b"Xid: 78\nXid: 95\nexit -9 4\nexit -9 3\na|b8\na|b9\na\n"
    assert [data[a:b] for _, a, b in matcher.lines(data)] == [b"Xid: 95", b"exit -9 3", b"a|b9"]
    odd = logknown.Known({"name": "y", "pattern": r"x\d{2}y", "unless": ""})
    assert [b for _, _, b in logknown.Matcher([odd]).lines(b"x12y\nx1y")] == [4]


@pytest.mark.parametrize("pattern", [r"Xid: 79\b", r"Xid: \d{2}x", "Xid|9{3}x"])
def test_a_line_of_many_states_is_read_once_by_each_row(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress bar without a newline is one line: read for each of its states, a megabyte took minutes."""
    row = logknown.Known({"name": "x", "pattern": pattern})
    read: list[bytes] = []
    plain = row.finds
    monkeypatch.setattr(row, "finds", lambda line: bool(read.append(line)) or plain(line))
    bar = b"".join(b"\rXid: %d%%" % (n % 70) for n in range(2_000))
    data = bar + b"\nXid: 79x\n" + bar
    found = [data[begin:end] for _, begin, end in logknown.Matcher([row]).lines(data)]
    assert read.count(bar) == 2 and len(read) <= 3
    assert found == [line for line in (bar, b"Xid: 79x", bar) if re.search(pattern.encode(), line)]


def test_no_row_must_read_every_line() -> None:
    """A pattern whose shape finds everything (digits in braces) costs a search of each line of each log."""
    assert [row.name for row in ROWS if any(not shape.pattern for shape in row.shapes)] == []


def test_branches_are_the_choices_at_the_top() -> None:
    assert logknown.branches(r"a|b(c|d)|[|]e\|f") == ["a", "b(c|d)", r"[|]e\|f"]


@pytest.mark.parametrize("kind", ["steps", "every line another"])
def test_a_megabyte_is_searched_in_a_few_hundredths_of_a_second(tmp_path: Path, kind: str) -> None:
    """About 10 ms for an ordinary log, 50 ms for one without any repetition; ten times that fails here."""
    rng = random.Random(0)
    lines = (
        (f"step {n} loss {4 / (n + 1):.4f} lr 1.0e-4 tokens/s 12034 mem 64.31 GiB" for n in range(150_000))
        if kind == "steps"
        else ("".join(rng.choices("abcdefgh ijkl/._", k=70)) for _ in range(60_000))
    )
    path = tmp_path / "log"
    path.write_text("\n".join(lines))
    before = time.process_time()
    logscan.scan(str(path), 0, ROWS, step=STEP, budget_s=60)
    spent = time.process_time() - before
    assert spent / (path.stat().st_size / 2**20) < (0.1 if kind == "steps" else 0.5)
