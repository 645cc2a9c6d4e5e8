"""Run with: pytest tests/unit/test_observe_logscan.py. Trouble in a log, found in one scan or in many."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.agent import logscan
from dflashctl.runs import known

ROWS = [logscan.Known(row) for row in known.patterns()]
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


def test_the_middle_of_a_long_log_is_skipped_and_said_so(tmp_path: Path) -> None:
    filler = b"x" * 99 + b"\n"
    text = TLS.encode() + filler * 1000 + CHAIN.encode() + filler * 1000 + b"CUDA out of memory\nstep 77\n"
    found = scan(tmp_path, text, head_bytes=10_000, tail_bytes=10_000)
    assert found["skipped_bytes"] == len(text) - 20_000 + 10_000 - len(text[:10_000].rpartition(b"\n")[0]) - 1
    assert found["exceptions"] == 1, "the chain lies in the part that was not read"
    assert found["known"]["cuda-oom"]["line"] == 8 + 2000 + 12
    assert found["step"] == 77


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
    (tmp_path / "log").rename(tmp_path / "old")
    assert scan(tmp_path, TLS * 9, resume=first["resume"])["exceptions"] == 9


@pytest.mark.parametrize("text", [None, "", "step (?P<step>", 7])
def test_a_step_pattern_that_does_not_compile_is_none(text: Any) -> None:
    assert logscan.compile_step(text) is None


PIECES = st.lists(st.sampled_from([TLS, CHAIN, "step 12\n", "CUDA out of memory\n", "a\rb\r\n", "no end"]))


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
