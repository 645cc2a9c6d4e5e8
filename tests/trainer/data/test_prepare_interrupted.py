"""`prepare` interrupted at any point, by many processes, and twice at once.

Run: python -m pytest tests/trainer/data/test_prepare_interrupted.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepare_kit import ALL, Make, content, make, rows, write

from trainer.data import prepare as preparing
from trainer.data.prepare import Tolerance, prepare
from trainer.data.reader import Settings
from trainer.data.store import Writer
from trainer.errors import ConfigError, DataError


class Stop(BaseException):
    """What ends a process at a moment that it did not choose."""


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    stops=st.lists(st.tuples(st.integers(0, 40), st.binary(max_size=30)), max_size=4),
    chunk=st.integers(150, 900),
)
def test_an_interrupted_prepare_goes_on_to_the_same_files(
    stops: list[tuple[int, bytes]],
    chunk: int,
    chat_target: Make,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp_path = tmp_path_factory.mktemp("resume")
    source = write(tmp_path / "a.jsonl", *rows(8), b"bad", *rows(8, seed=1), b"worse")
    target = chat_target("chatml")
    left = -1  # calls until the end; below 0: never

    def fsync(descriptor: int) -> None:
        """Called several times a chunk, between any two files; real ones would take most of the time."""
        nonlocal left
        if left == 0:
            raise Stop
        left -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        whole = content(make(tmp_path / "whole", source, target).folder)
        for after, scribble in stops:
            left = after
            try:
                make(tmp_path / "out", source, target, chunk_bytes=chunk)
            except Stop:
                # What was written after the journal's word is of no meaning, whatever it is.
                for part in (tmp_path / "out").glob("*.partial/*.bin"):
                    with part.open("ab") as file:
                        file.write(scribble)
        left = -1
        store = make(tmp_path / "out", source, target, chunk_bytes=chunk)
    assert content(store.folder) == whole
    assert [path.name for path in (tmp_path / "out").iterdir()] == [store.folder.name]


WAITS_AFTER_SOME_CHUNKS = """
import os, time
import trainer.data.prepare, trainer.data.store
trainer.data.prepare.CHUNK_BYTES = 20_000
left, add = int(os.environ["TEST_CHUNKS"]), trainer.data.store.Writer.add
def waits(self, *arguments):
    global left
    found = add(self, *arguments)
    left -= 1
    if left == 0:
        time.sleep(600)
    return found
trainer.data.store.Writer.add = waits
from trainer.cli import main
main()
"""


def run(chunks: int, *arguments: Any) -> subprocess.Popen[bytes]:
    """A prepare that stands still after so many chunks, until a signal comes."""
    return subprocess.Popen(
        [sys.executable, "-c", WAITS_AFTER_SOME_CHUNKS, "prepare", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TEST_CHUNKS": str(chunks)},
        start_new_session=True,
    )


def alive(session: int) -> list[int]:
    """Processes of a session that are no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, owner = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(owner) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def test_many_processes_killed_and_started_again_make_the_same_store(
    tmp_path: Path, chat_target: Make
) -> None:
    source = write(tmp_path / "a.jsonl", *(rows(400) * 2))
    target = chat_target("qwen3")
    whole = content(make(tmp_path / "whole", source, target).folder)
    command = [source, "--target", target, "--out", tmp_path / "out", "--workers", 2]

    def chunks_done() -> int:
        try:
            return sum(
                json.loads(path.read_text())["chunks"] for path in (tmp_path / "out").glob("*/journal.json")
            )
        except FileNotFoundError:  # replaced at this moment
            return 0

    for chunks, sign, code in ((3, signal.SIGKILL, -9), (2, signal.SIGINT, 130)):
        wanted = chunks_done() + chunks
        process = run(chunks, *command)
        wait_until(partial(reached, chunks_done, wanted))
        process.send_signal(sign)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors
        assert b"Traceback" not in errors
        wait_until(partial(ended, process.pid))  # no worker outlives it
    process = run(-1, *command)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert b"going on after 5 of" in errors
    folder = Path(printed.decode().splitlines()[-1])
    assert content(folder) == whole
    assert "source: store" in printed.decode()


def reached(count: Callable[[], int], wanted: int) -> bool:
    return count() >= wanted


def ended(session: int) -> bool:
    return not alive(session)


def wait_until(true: Callable[[], Any], deadline_s: float = 120) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def test_a_worker_that_dies_is_said(
    tmp_path: Path, chat_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", *rows(60))
    # A tokenizer that workers cannot have: their processes end while they begin.
    target = tmp_path / "target"
    target.mkdir()
    for path in chat_target("chatml").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(preparing, "_begin_worker", os._exit)
    with pytest.raises(DataError, match="a worker process ended without a word") as caught:
        prepare([source], Settings(str(target)), tmp_path / "out", ALL, workers=2, chunk_bytes=500)
    assert "run the same command again" in caught.value.next


def test_two_at_once_and_ranks_are_refused(
    tmp_path: Path, chat_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", *rows(4))
    folder = make(tmp_path / "probe", source, chat_target("chatml")).folder
    with (
        Writer(tmp_path / "out" / folder.name, 100),
        pytest.raises(ConfigError, match="another prepare is making this store"),
    ):
        make(tmp_path / "out", source, chat_target("chatml"))
    make(tmp_path / "out", source, chat_target("chatml"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="this is one of several ranks") as caught:
        make(tmp_path / "out", source, chat_target("chatml"))
    assert "before torchrun" in caught.value.next


def test_a_store_in_the_making_that_lost_bytes_is_not_gone_on_with(tmp_path: Path, chat_target: Make) -> None:
    source = write(tmp_path / "a.jsonl", *rows(30))
    target = chat_target("chatml")
    with pytest.raises(DataError):
        make(
            tmp_path / "out",
            write(tmp_path / "a.jsonl", *rows(30), b"{"),
            target,
            tolerance=Tolerance(rows=0),
        )
    (partial,) = (tmp_path / "out").glob("*.partial")
    (partial / "ends.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"ends\.bin is shorter than the journal says"):
        make(tmp_path / "out", source, target, tolerance=Tolerance(rows=0))
    (partial / "journal.json").write_text("{")
    with pytest.raises(DataError, match="the journal cannot be read"):
        make(tmp_path / "out", source, target, tolerance=Tolerance(rows=0))


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_stays_behind_when_the_first_chunk_was_not_done(
    tmp_path: Path, chat_target: Make, workers: int
) -> None:
    source = write(tmp_path / "a.jsonl", *rows(30))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    settings = Settings(str(chat_target("chatml")), template_file=str(broken))
    out = tmp_path / "deep" / "out"
    with pytest.raises(ConfigError, match="the chat template is not valid"):
        prepare([source], settings, out, ALL, workers, lambda text: None, chunk_bytes=500)
    assert not (tmp_path / "deep").exists()
    out.mkdir(parents=True)  # a person's own folder stays
    with pytest.raises(ConfigError, match="the chat template is not valid"):
        prepare([source], settings, out, ALL, workers, lambda text: None, chunk_bytes=500)
    assert out.is_dir() and not list(out.iterdir())
