"""The token store: what `prepare` makes and training reads, memory-mapped.

A folder named by the hash of inputs and settings:

    store.json          identity (inputs, tokenizer, template and mode), counts, where inputs and target were
    tokens.bin          int32 [T]      all documents one after the other
    supervised.bin      uint8 [T]      1 where trained on
    ends.bin            int64 [D]      where each document ends in tokens.bin
    origins.bin         int64 [D, 2]   file number and line number of each document
    bad_rows.jsonl      rows that could not be used: file, line, reason

While it is being made the folder is called NAME.partial and holds journal.json too: how long each file was
when the last chunk of input was done. What lies beyond is cut off when work goes on. NAME exists only when
complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.reader import Documents
from trainer.errors import ConfigError, DataError
from trainer.writing import make_folder, sync

VERSION = 1
PARTS = ("tokens.bin", "supervised.bin", "ends.bin", "origins.bin", "bad_rows.jsonl")
HASH_LETTERS = 16
RELEASE = Path(__file__).resolve().parents[2]


def name_of(identity: dict[str, Any]) -> str:
    """The folder's name: a hash of what decides its content."""
    text = json.dumps({**identity, "format": VERSION}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]


@dataclass
class Journal:
    """How far the work is, and what was found so far."""

    chunk_bytes: int
    chunks: int = 0  # done
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    rows: int = 0
    bad_rows: int = 0
    other_mode: int = 0
    file: int = 0  # number of the input file that the last chunk was in
    lines: int = 0  # seen in that file


class Writer:
    """Makes a store, chunk after chunk; goes on where an earlier one stopped.

    Raises:
        ConfigError: another process is at it.
        DataError: what an earlier one left cannot be gone on with.
    """

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self.final = folder
        self.partial = folder.with_name(folder.name + ".partial")
        self._new = [place for place in (self.partial, *self.partial.parents) if not place.exists()]
        make_folder(self.partial)
        self._lock = (self.partial / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                "another prepare is making this store",
                where=str(self.partial),
                next="wait for it, or end it first",
            ) from None
        self.journal = self._read_journal() or Journal(chunk_bytes)
        self._files = {name: (self.partial / name).open("ab") for name in PARTS}
        for name, file in self._files.items():
            size = self.journal.sizes[name]
            if file.tell() < size:
                self.close()
                raise DataError(
                    f"{name} is shorter than the journal says",
                    where=str(self.partial),
                    next="remove that folder and prepare again",
                )
            file.truncate(size)

    def _read_journal(self) -> Journal | None:
        path = self.partial / "journal.json"
        try:
            return Journal(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise DataError(
                "the journal cannot be read", where=str(path), next="remove that folder and prepare again"
            ) from None

    def add(self, found: Documents, file: int, file_name: str) -> list[tuple[int, str]]:
        """Append the documents of the next chunk. Returns its bad rows, by their line numbers in the file."""
        journal = self.journal
        if file != journal.file:
            journal.file, journal.lines = file, 0
        ends = journal.tokens + np.cumsum(found.lengths)
        origins = np.stack(
            [np.full_like(found.line_numbers, file), found.line_numbers + journal.lines], axis=1
        )
        bad = [(line + journal.lines, reason) for line, reason in found.bad]
        said = [
            json.dumps({"file": file_name, "line": line, "reason": reason}) + "\n" for line, reason in bad
        ]
        for name, content in (
            ("tokens.bin", found.tokens.astype("<i4", copy=False).tobytes()),
            ("supervised.bin", found.supervised.astype("u1").tobytes()),
            ("ends.bin", ends.astype("<i8", copy=False).tobytes()),
            ("origins.bin", origins.astype("<i8", copy=False).tobytes()),
            ("bad_rows.jsonl", "".join(said).encode()),
        ):
            self._files[name].write(content)
            journal.sizes[name] += len(content)
        journal.documents += len(found.lengths)
        journal.tokens += len(found.tokens)
        journal.supervised += int(found.supervised.sum())
        journal.rows += found.rows
        journal.bad_rows += len(bad)
        journal.other_mode += found.other_mode
        journal.lines += found.lines
        journal.chunks += 1
        self._note()
        return bad

    def _note(self) -> None:
        """Everything written so far is on disk before the journal says so."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        _replace(self.partial / "journal.json", json.dumps(asdict(self.journal), sort_keys=True))

    def finish(self, identity: dict[str, Any], files: list[str], target: str) -> Path:
        """Give the complete store its name."""
        counts = {
            key: getattr(self.journal, key)
            for key in ("documents", "tokens", "supervised", "rows", "bad_rows", "other_mode")
        }
        content = {
            "version": VERSION,
            "identity": identity,
            "counts": counts,
            "files": files,
            "target": target,
        }
        _replace(self.partial / "store.json", json.dumps(content, indent=1, sort_keys=True) + "\n")
        (self.partial / "journal.json").unlink()
        (self.partial / "lock").unlink()
        self.partial.rename(self.final)
        sync(self.final.parent)
        return self.final

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.close()

    def _leave_nothing(self) -> None:
        """Take away what was begun when no chunk is in it, and the folders that were made for it."""
        for name in (*PARTS, "lock"):  # the lock last: nobody else takes a folder that is going
            (self.partial / name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty: somebody else's things, and so is what is above
            self.partial.rmdir()
            for place in self._new[1:]:
                place.rmdir()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self.journal.chunks:
            self._leave_nothing()
        self.close()


class Store:
    """A finished store, read only.

    Raises:
        ConfigError: there is none, it is unfinished, or its files are not what store.json says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "store.json"
        if not path.is_file():
            unfinished = (
                folder.name.endswith(".partial") or folder.with_name(folder.name + ".partial").exists()
            )
            raise ConfigError(
                "the store is not finished" if unfinished else "no prepared store there (store.json)",
                where=str(folder),
                next="run `python -m trainer prepare` first; it prints the folder's name",
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["version"]
            self.identity: dict[str, Any] = content["identity"]
            self.counts: dict[str, int] = content["counts"]
            self.files: list[str] = content["files"]
            self.target: str = content["target"]  # folder that its tokenizer was read from
            documents, tokens = self.counts["documents"], self.counts["tokens"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cannot be read: {error}", where=str(path)) from None
        if version != VERSION:
            raise ConfigError(
                f"version {version}; this trainer reads version {VERSION}",
                where=str(path),
                next="prepare the data again",
            )
        self.tokens: NDArray[np.int32] = self._part("tokens.bin", "<i4", (tokens,))
        self.supervised: NDArray[np.uint8] = self._part("supervised.bin", "u1", (tokens,))
        self.ends: NDArray[np.int64] = self._part("ends.bin", "<i8", (documents,))
        self.origins: NDArray[np.int64] = self._part("origins.bin", "<i8", (documents, 2))

    def _part(self, name: str, kind: str, shape: tuple[int, ...]) -> Any:
        path = self.folder / name
        wanted = int(np.prod(shape)) * np.dtype(kind).itemsize
        found = path.stat().st_size if path.is_file() else -1
        if found != wanted:
            problem = "is missing" if found < 0 else f"has {found:,} bytes, not {wanted:,}"
            raise ConfigError(
                f"{problem}: the store is damaged",
                where=str(path),
                next="prepare the data again, or copy the store again",
            )
        return np.memmap(path, kind, "r", shape=shape) if wanted else np.empty(shape, kind)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[D] tokens of each document."""
        return np.diff(self.ends, prepend=0)

    def document(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids and marks of one document."""
        place = slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))
        return self.tokens[place], self.supervised[place].astype(np.bool_)

    def origin(self, number: int) -> str:
        """FILE:LINE that a document came from."""
        file, line = self.origins[number].tolist()
        return f"{self.files[file]}:{line}"

    def facts(self) -> dict[str, Any]:
        """What to keep with every checkpoint trained on this store: its name, the hashes of its inputs and of
        the tokenizer, the template and its mode.
        """
        return {"source": "store", "store": self.folder.name, **self.identity, "counts": self.counts}


def find_store(path: str) -> Path:
    """A store's folder as a recipe names it: absolute, or below the working folder or the release."""
    places = [Path(path)] if Path(path).is_absolute() else [Path.cwd() / path, RELEASE / path]
    return next((place for place in places if (place / "store.json").is_file()), places[0])


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)
