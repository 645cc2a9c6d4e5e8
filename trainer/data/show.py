"""`data show`: one row as training sees it, in colour, so that people look before they train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from trainer.data import lines
from trainer.data.encoding import Encoder
from trainer.data.reader import Reader, Settings
from trainer.data.store import Store
from trainer.data.stored import StoredRows
from trainer.errors import DataError
from trainer.words import plural, printable

TRAINED, CONTEXT, HEADING = "bold green", "", "black on cyan"


@dataclass(frozen=True)
class Shown:
    """A document of a row: what stands above it, its ids and which of them are trained on."""

    heading: str
    tokens: Sequence[int]
    supervised: Sequence[bool]


def row_of_store(folder: Path, row: int, row_tokens: int, seed: int, long: str) -> list[Shown]:
    """The documents of packed row number `row`, counted through all epochs, as a run of these settings reads
    it.
    """
    store = Store(folder)
    rows = StoredRows(store, row_tokens, seed, "refuse" if long == "refuse" else "split")
    shown = []
    members = rows.members(row)
    for number, piece in enumerate(members):
        start, length = int(rows.pieces.starts[piece]), int(rows.pieces.lengths[piece])
        document = int(rows.pieces.documents[piece])
        whole = int(store.lengths[document])
        part = "" if length == whole else f", {length:,} of its {whole:,} tokens"
        heading = (
            f"document {number + 1} of {len(members)}: {store.origin(document)}, {length:,} tokens{part}"
        )
        place = slice(start, start + length)
        shown.append(
            Shown(heading, store.tokens[place].tolist(), store.supervised[place].astype(bool).tolist())
        )
    return shown


def row_of_file(path: Path, row: int, settings: Settings) -> list[Shown]:
    """The documents that `prepare` would make of row number `row` (from 0) of a JSONL file.

    Raises:
        DataError: there is no such row, or it is a bad one.
    """
    reader = Reader(settings)
    seen, at = 0, 0
    for number, line in enumerate(lines.lines_in(path, 0, path.stat().st_size, settings.max_line_bytes), 1):
        start, at = at, at + line.size
        if line.raw is not None and not line.raw.strip():
            continue
        if seen == row:
            found = reader.read(path, start, start + 1)
            if found.bad:
                raise DataError(found.bad[0][1], where=f"{path}:{number}")
            shown, begin = [], 0
            for length in found.lengths.tolist():
                place = slice(begin, begin + length)
                begin += length
                heading = f"{path}:{number}, {length:,} tokens"
                shown.append(Shown(heading, found.tokens[place].tolist(), found.supervised[place].tolist()))
            return shown
        seen += 1
    raise DataError(f"no row {row}: it has {plural(seen, 'row')}, counted from 0", where=str(path))


def pieces(document: Shown, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The document's text in stretches, each trained on or not."""
    for trained, group in groupby(
        zip(document.tokens, document.supervised, strict=True), key=lambda pair: pair[1]
    ):
        yield tokenizer.decode([token for token, _ in group], skip_special_tokens=False), bool(trained)


def render(documents: Sequence[Shown], tokenizer: Tokenizer) -> Text:
    """Coloured where colours are; trained words are also between guillemets, for those who see none."""
    text = Text()
    for document in documents:
        text.append(f" {document.heading}, {sum(document.supervised):,} trained on ", HEADING)
        text.append("\n")
        for words, trained in pieces(document, tokenizer):
            text.append(
                f"«{printable(words)}»" if trained else printable(words), TRAINED if trained else CONTEXT
            )
        text.append("\n")
    return text


def show(documents: Sequence[Shown], target: Path, console: Console) -> None:
    tokenizer = Encoder(target).tokenizer
    console.print(Text.assemble(("«trained on»", TRAINED), "  ", ("context", CONTEXT)))
    console.print(render(documents, tokenizer), soft_wrap=True)
