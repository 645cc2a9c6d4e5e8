"""Run with: pytest tests/local/test_pull_meanwhile.py. Files that change while they are brought home, and
strange ones, and many."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pull_kit import OLD, Meanwhile, envelope, fetch, folder, host, listened, tree

from dflashctl.config.hosts import Host
from dflashctl.errors import NotFound
from dflashctl.history.places import PART
from dflashctl.history.pull import pull
from dflashctl.remote.engine import Completed
from dflashctl.remote.local import LocalEngine

__all__ = ["folder", "host"]

BIG = random.Random(5).randbytes(3_000_000)


def grow(file: Path) -> None:
    with file.open("ab") as more:
        more.write(b"more")


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (grow, "it changed there while it was read"),
        (lambda file: os.truncate(file, 2_999_999), "it became shorter there while it was read"),
    ],
    ids=["grows", "shrinks"],
)
def test_a_checkpoint_that_is_written_to_meanwhile_is_refused_and_the_rest_comes(
    act: Callable[[Path], None], why: str, folder: Path, host: Host, tmp_path: Path
) -> None:
    """Its beginning alone would pass for the whole; and the others have nothing to do with it."""
    big = folder / "checkpoints" / "big"
    big.write_bytes(BIG)
    os.utime(big, (OLD, OLD))
    result = listened(host, tmp_path / "here", Meanwhile(host, lambda: act(big)))
    assert result.refused == [("big", why)]
    assert sorted(result.fetched) == ["empty", "step_1/w.bin", "step_2/w.bin"]
    assert not (tmp_path / "here" / "big").exists()
    assert fetch(host, tmp_path / "here").fetched == ["big"]
    assert tree(tmp_path / "here") == tree(folder / "checkpoints")


@pytest.mark.parametrize("size", [2_000_000, 3_000_000, 4_000_000])
def test_a_file_that_another_replaces_meanwhile_comes_as_it_was_or_as_it_is(
    size: int, folder: Path, host: Host, tmp_path: Path
) -> None:
    """And of nothing that the line does: it is not asked for base64 then."""
    big, new = folder / "checkpoints" / "big", random.Random(6).randbytes(size)
    big.write_bytes(BIG)

    def replace() -> None:
        (folder / "new").write_bytes(new)
        (folder / "new").rename(big)

    fetched = listened(host, tmp_path / "whole", Meanwhile(host, replace))
    assert "big" in fetched.fetched and (tmp_path / "whole" / "big").read_bytes() == BIG
    big.write_bytes(BIG)
    engine = Meanwhile(host, replace, breaks=True)
    fetched = listened(host, tmp_path / "broke", engine)
    assert "big" in fetched.fetched and (tmp_path / "broke" / "big").read_bytes() == new
    assert engine.raw == [True, True]


@pytest.mark.parametrize("beat", [b'{"step": 1}', b'{"step": 100, "more": "words"}'], ids=["short", "long"])
def test_the_heart_of_a_live_run_beats_between_the_list_and_the_copy(
    beat: bytes, folder: Path, host: Host, tmp_path: Path
) -> None:
    (folder / "heartbeat.json").write_bytes(b'{"step": 10, "of": 20}')

    class Beating(LocalEngine):
        def run(self, argv: Sequence[str], *, stdin: bytes = b"", **rest: Any) -> Completed:
            if b"pull_file" in envelope(stdin):
                (folder / "beat").write_bytes(beat)
                (folder / "beat").replace(folder / "heartbeat.json")
            return super().run(argv, stdin=stdin, **rest)

    into = tmp_path / "here"
    result = pull(host, tag="t", what="metrics", into=into, connect=Beating)
    assert "heartbeat.json" in result.fetched and (into / "heartbeat.json").read_bytes() == beat


def test_a_run_that_is_pruned_meanwhile_leaves_what_has_come(
    folder: Path, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with an error that no run had been launched yet, and an empty folder like a checkpoint."""
    monkeypatch.setattr("dflashctl.history.pull.BATCH_FILES", 1)
    into, calls = tmp_path / "here", iter(range(9))

    class Pruning(LocalEngine):
        def run(self, argv: Sequence[str], *, stdin: bytes = b"", **rest: Any) -> Completed:
            if b"pull_file" in envelope(stdin) and next(calls) == 2:
                shutil.rmtree(folder)
            return super().run(argv, stdin=stdin, **rest)

    result = pull(host, tag="t", what="checkpoints", into=into, connect=Pruning)
    assert (result.fetched, result.gone) == (["empty", "step_1/w.bin"], ["step_2/w.bin"])
    assert sorted(each.name for each in into.iterdir()) == ["empty", "step_1"]
    with pytest.raises(NotFound, match="no run"):
        fetch(host, into)


def test_many_small_files_come_in_few_calls(folder: Path, host: Host, tmp_path: Path) -> None:
    """A call costs the start of pct and of Python, about a second."""
    for number in range(250):
        (folder / "checkpoints" / f"{number:03}").write_bytes(b"%d\n" % number * (number % 7))
    engine = Meanwhile(host, lambda: None)
    result = listened(host, tmp_path / "here", engine)
    assert len(result.fetched) == 253 and tree(tmp_path / "here") == tree(folder / "checkpoints")
    assert len(engine.raw) == 3
    assert len(listened(host, tmp_path / "here", engine).same) == 253 and len(engine.raw) == 6


STRANGE = ["a b", "\n", "'\"$(x)", "-rf", b"\xff\xfe".decode("utf-8", "surrogateescape"), "ünï", "n" * 255]


def test_strange_names(folder: Path, host: Host, tmp_path: Path) -> None:
    for name in STRANGE:
        (folder / "checkpoints" / name).write_bytes(os.fsencode(name))
    (folder / "checkpoints" / f"empty{PART}").write_bytes(b"another's")
    into = tmp_path / "here"
    result = fetch(host, into, cuts=[800, 300])
    assert set(STRANGE) <= set(result.fetched)
    assert result.refused == [(f"empty{PART}", f"{PART} is what parts of files are called here")]
    assert tree(into) == {k: v for k, v in tree(folder / "checkpoints").items() if not k.endswith(PART)}
