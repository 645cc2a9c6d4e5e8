"""`prepare`: rows of the input to a token store, by many processes, in one order, resumable at any moment.

The input is cut into chunks by bytes. Workers read, render and encode chunks; this process appends what they
found in the order of the chunks, so the store does not depend on the number of workers or on interruptions.
At most two chunks a worker are under way: memory does not grow with the input.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from shlex import quote
from typing import Any

from trainer.data.lines import BOM, file_digest
from trainer.data.meter import Meter
from trainer.data.reader import Documents, Reader, Settings
from trainer.data.store import Journal, Store, Writer, name_of
from trainer.errors import ConfigError, DataError
from trainer.words import plural

CHUNK_BYTES = 2 << 20
JUDGED_FROM_ROWS = 1000  # a share of bad rows says nothing about fewer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Chunk:
    """Lines that begin in bytes [start, stop) of one input file."""

    file: int
    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Tolerance:
    """How many bad rows are borne: a number, or a share of all rows."""

    rows: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """ "20" or "0.5%".

        Raises:
            ConfigError: neither.
        """
        try:
            if text.endswith("%"):
                share = float(text[:-1]) / 100
                if 0 <= share <= 1:
                    return cls(share=share)
            elif int(text) >= 0:
                return cls(rows=int(text))
        except ValueError:
            pass
        raise ConfigError(
            f"{text!r} is neither a number of rows nor a share like 0.5%", where="--max-bad-rows"
        )

    def exceeded(self, journal: Journal, finished: bool) -> bool:
        if self.rows is not None:
            return journal.bad_rows > self.rows
        assert self.share is not None
        judged = finished or journal.rows >= JUDGED_FROM_ROWS
        return judged and journal.bad_rows > self.share * journal.rows

    def __str__(self) -> str:
        return f"{self.rows} rows" if self.rows is not None else f"{100 * (self.share or 0):g} %"


def plan(inputs: Sequence[Path], chunk_bytes: int) -> list[Chunk]:
    """The chunks of all inputs in order; a .txt file is one document, so one chunk."""
    chunks = []
    for number, path in enumerate(inputs):
        size = path.stat().st_size
        step = max(1, size) if path.suffix == ".txt" else chunk_bytes
        chunks += [Chunk(number, path, at, min(size, at + step)) for at in range(0, size, step)]
    return chunks


def prepare(
    inputs: Sequence[Path],
    settings: Settings,
    out: Path,
    tolerance: Tolerance,
    workers: int = 1,
    say: Say = print,
    chunk_bytes: int | None = None,
) -> Store:
    """The store of these inputs below `out`, made unless it is there.

    Raises:
        ConfigError: an input or the target cannot be used; or this is one of several ranks.
        DataError: more bad rows than tolerated (they are named), or nothing to train on.
    """
    refuse_ranks()
    _check_inputs(inputs)
    reader = Reader(settings)
    identity = {"inputs": [_describe(path) for path in inputs], **reader.identity()}
    folder = out / name_of(identity)
    if folder.is_dir():
        say(f"{folder} is there already")
        return Store(folder)
    with Writer(folder, chunk_bytes or CHUNK_BYTES) as writer:
        chunks = plan(inputs, writer.journal.chunk_bytes)
        if writer.journal.chunks:
            say(f"going on after {writer.journal.chunks} of {len(chunks)} chunks")
        _fill(writer, chunks, reader, tolerance, workers)
        journal = writer.journal
        if tolerance.exceeded(journal, finished=True):
            raise _too_many(writer, tolerance)
        if not journal.supervised:
            raise DataError(
                f"nothing to train on in {plural(journal.rows, 'row')} ({journal.bad_rows:,} bad)"
                + _first_bad(writer.partial),
                where=", ".join(map(str, inputs)),
            )
        writer.finish(identity, [str(path) for path in inputs], settings.target)
    return Store(folder)


def refuse_ranks() -> None:
    """Data is made before ranks start: a rank that waits for it would run into the others' timeout."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "this is one of several ranks (WORLD_SIZE is set)",
            next="run prepare once, before torchrun; the ranks then map the same finished store",
        )


def _check_inputs(inputs: Sequence[Path]) -> None:
    if not inputs:
        raise ConfigError("no input files", next="name JSONL or .txt files")
    for path in inputs:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "no file of bytes that stay"
            raise ConfigError(what, where=str(path), next="name the files themselves, .jsonl or .txt")
        if path.suffix not in (".jsonl", ".json", ".txt"):
            raise ConfigError("neither .jsonl nor .txt", where=str(path), next=_conversion(path))
        if not path.is_file():
            raise ConfigError("no such file", where=str(path))
        if path.suffix == ".json" and _is_list(path):
            raise ConfigError(
                "one JSON list, not a JSON object a line",
                where=str(path),
                next=f"jq -c '.[]' {quote(str(path))} > {quote(str(path.with_suffix('.jsonl')))}",
            )


def _conversion(path: Path) -> str:
    inner = path.with_suffix("")
    if path.suffix == ".gz" and inner.suffix in (".jsonl", ".json", ".txt"):
        return f"gunzip -k {quote(str(path))}, and name {inner}"
    return "convert it to JSON lines"


def _is_list(path: Path) -> bool:
    """Whether a file begins as one list does; such a row would be a bad one anyway."""
    try:
        with path.open("rb") as file:
            return file.read(4096).removeprefix(BOM).lstrip().startswith(b"[")
    except OSError:
        return False  # whoever reads it will say why not


def _describe(path: Path) -> dict[str, Any]:
    try:
        digest = file_digest(path)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return {"kind": path.suffix[1:], "bytes": path.stat().st_size, "sha256": digest}


def _fill(writer: Writer, chunks: list[Chunk], reader: Reader, tolerance: Tolerance, workers: int) -> None:
    left = chunks[writer.journal.chunks :]
    total = sum(chunk.stop - chunk.start for chunk in chunks)
    done = total - sum(chunk.stop - chunk.start for chunk in left)
    with (
        Meter("prepare", total, done, 1e6, "MB", writer.journal.tokens) as meter,
        _documents(left, reader, workers) as found,
    ):
        for chunk, documents in zip(left, found, strict=True):
            writer.add(documents, chunk.file, str(chunk.path))
            done += chunk.stop - chunk.start
            journal = writer.journal
            meter.update(done, journal.tokens, f"{journal.bad_rows:,} bad rows" if journal.bad_rows else "")
            if tolerance.exceeded(journal, finished=False):
                raise _too_many(writer, tolerance)


@contextmanager
def _documents(chunks: list[Chunk], reader: Reader, workers: int) -> Iterator[Iterator[Documents]]:
    """What is in each chunk, in order."""
    if workers <= 1 or len(chunks) <= 1:
        yield (reader.read(chunk.path, chunk.start, chunk.stop) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(reader.settings,),
    )
    try:
        yield _in_order(pool, chunks, 2 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, chunks: list[Chunk], at_once: int) -> Iterator[Documents]:
    waiting: deque[Future[Documents]] = deque()
    rest = iter(chunks)
    try:
        while True:
            while len(waiting) < at_once and (chunk := next(rest, None)) is not None:
                waiting.append(pool.submit(_work, chunk))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process ended without a word; most often the system ran out of memory",
            next="run the same command again: it goes on where it stopped; fewer --workers need less",
        ) from None


_READER: Reader | None = None


def _begin_worker(settings: Settings) -> None:
    global _READER
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _READER = Reader(settings)


def _end_with(sentinel: int) -> None:
    """No worker outlives the process that it works for."""
    connection.wait([sentinel])
    os._exit(1)


def _work(chunk: Chunk) -> Documents:
    assert _READER is not None
    return _READER.read(chunk.path, chunk.start, chunk.stop)


def _too_many(writer: Writer, tolerance: Tolerance) -> DataError:
    journal = writer.journal
    return DataError(
        f"{journal.bad_rows:,} of {journal.rows:,} rows are bad, more than {tolerance}"
        + _first_bad(writer.partial),
        where="--max-bad-rows",
        next=f"mend them (see {writer.partial / 'bad_rows.jsonl'}) or tolerate more; what is done is kept",
    )


def _first_bad(folder: Path, count: int = 5) -> str:
    with (folder / "bad_rows.jsonl").open(encoding="utf-8") as file:
        return "".join(f"\n  {each}" for each in named(file, count))


def named(bad_rows: Any, count: int) -> list[str]:
    """The first lines of a bad_rows.jsonl as FILE:LINE: reason."""
    rows = [json.loads(line) for line in itertools.islice(bad_rows, count)]
    return [f"{row['file']}:{row['line']}: {row['reason']}" for row in rows]
