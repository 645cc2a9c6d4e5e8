"""Text with spans -> token ids with marks, each proven by decoding the ids back.

A text is encoded as a whole, as servers do with a prompt. A token is trained on when it lies in a span. Where
a token would lie across the border of a span, the text is encoded in pieces that meet at the border: a server
encodes the prompt alone too, and the target writes on from there.

Two ways to the same answer. Byte-level tokenizers (Qwen, Llama 3, SmolLM, GPT kinds) have a table of each
token's bytes: all ids together must spell the text to the byte, and the running sum of lengths gives every
border. For all others the tokenizer's own offsets give the borders, and decoding with and without a span must
differ by that span's text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.data.chat_template import Span, special_tokens
from trainer.data.lines import BadRow
from trainer.errors import ConfigError
from trainer.shortage import is_shortage


@dataclass(frozen=True)
class Encoded:
    """One document: ids [n] int32, and which are trained on [n] bool."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]


class Encoder:
    """The tokenizer of the target in `folder`.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError("the target has no tokenizer.json", where=str(path))
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            if is_shortage(error):
                raise
            raise ConfigError(f"cannot read the tokenizer: {error}", where=str(path)) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # Above every id: a vocabulary may have gaps, so their number says less.
        self.vocabulary = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = sorted(token.content for token in added.values() if token.special)
        self.ends = _end_tokens(folder, self.tokenizer)
        self._bytes = byte_table(self.tokenizer)
        if self._bytes is not None:
            self._lengths = np.array([len(each) for each in self._bytes], dtype=np.int64)
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self.tokenizer.token_to_id(unknown)
        self._around: tuple[list[int], list[int]] | None = None

    def conversations(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Encoded | BadRow]:
        """Encode texts, trained on in their spans of characters; what cannot be proven comes back as a
        BadRow.
        """
        if self._bytes is None:
            whole = self.tokenizer.encode_batch(texts, add_special_tokens=False)
            one = self._by_offsets
        else:
            whole = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            one = self._by_bytes
        found: list[Encoded | BadRow] = []
        for text, each, encoding in zip(texts, spans, whole, strict=True):
            try:
                found.append(one(text, each, encoding))
            except BadRow as error:
                found.append(error)
        return found

    def plain(self, texts: Sequence[str]) -> list[Encoded | BadRow]:
        """Encode plain texts with what the tokenizer puts around one, and an end token; the beginning token
        is nobody's words and not trained on. A text that the tokenizer has no tokens for comes back as a
        BadRow.
        """
        before, after = self._put_around()
        found: list[Encoded | BadRow] = []
        whole = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for text, encoding in zip(texts, whole, strict=True):
            if not self._has_all(text, encoding.ids):
                found.append(BadRow("the target's tokenizer has no tokens for some of its characters"))
                continue
            ids = np.array([*before, *encoding.ids, *after], dtype=np.int32)
            supervised = np.ones(len(ids), dtype=np.bool_)
            supervised[: len(before)] = False
            found.append(Encoded(ids, supervised))
        return found

    def _has_all(self, text: str, ids: list[int]) -> bool:
        """Whether the tokens stand for all of a text, but for white space, which some swallow or add; a
        tokenizer that normalizes is taken at its word.
        """
        if self._bytes is None:
            return self._unknown not in ids
        spelt = self._spelt(ids)
        if spelt == text.encode():
            return True
        normal, _ = _normalised(self.tokenizer, text, [])
        return b"".join(spelt.split()) == b"".join(normal.encode().split())

    def _put_around(self) -> tuple[list[int], list[int]]:
        if self._around is None:
            bare = self.tokenizer.encode("a", add_special_tokens=False).ids
            full = self.tokenizer.encode("a", add_special_tokens=True).ids
            start = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), 0)
            before, after = full[:start], full[start + len(bare) :]
            ends = [number for number in map(self.tokenizer.token_to_id, self.ends) if number is not None]
            self._around = (before, after or ends[:1])
        return self._around

    def _by_bytes(self, text: str, spans: Sequence[Span], encoding: Any) -> Encoded:
        assert self._bytes is not None
        ids = encoding.ids
        if self._spelt(ids) != text.encode():
            text, spans = _normalised(self.tokenizer, text, spans)
            if self._spelt(ids) != text.encode():
                offsets = self.tokenizer.encode(text, add_special_tokens=False)
                return self._by_offsets(text, spans, offsets)
        tokens = np.fromiter(ids, dtype=np.int32, count=len(ids))
        ends = np.cumsum(self._lengths[tokens])
        borders = np.array(_byte_borders(text, spans), dtype=np.int64)
        # The token that begins at each border, if the border is where one begins.
        places = np.searchsorted(ends, borders, side="right")
        starts = np.where(places > 0, ends[np.maximum(places - 1, 0)], 0)
        if not np.array_equal(starts, borders):
            return self._in_pieces(text, spans)
        return Encoded(tokens, _inside(len(tokens), places.tolist()))

    def _spelt(self, ids: list[int]) -> bytes:
        """What the ids stand for, byte for byte."""
        assert self._bytes is not None
        # itemgetter gathers in C; of a single id it gives no tuple.
        return (
            b"".join(itemgetter(*ids)(self._bytes)) if len(ids) > 1 else b"".join(self._bytes[n] for n in ids)
        )

    def _in_pieces(self, text: str, spans: Sequence[Span]) -> Encoded:
        pieces, marks = _cut(text, spans)
        parts = [self.tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
        ids = [each for part in parts for each in part]
        if self._bytes is not None:
            proven = self._spelt(ids) == text.encode()
        else:
            proven = self._decode(ids) == text
        if not proven:
            raise BadRow(
                "a token lies across the beginning or end of an answer, and pieces do not decode back"
            )
        supervised = [mark for mark, part in zip(marks, parts, strict=True) for _ in part]
        return Encoded(np.array(ids, dtype=np.int32), np.array(supervised, dtype=np.bool_))

    def _by_offsets(self, text: str, spans: Sequence[Span], encoding: Any) -> Encoded:
        ids, offsets = encoding.ids, encoding.offsets
        places: list[int] = []
        for start, stop in spans:
            first = _first_from(offsets, text, start, opens=True)
            last = _first_from(offsets, text, stop, opens=False)
            shown = self._decode(ids[first:last])
            # Decoding may drop a space in front, unless something stands before it.
            joined = self._decode(ids[:first]) + text[start:stop]
            if shown != text[start:stop] and joined != self._decode(ids[:last]):
                if any(a < border < b for a, b in offsets for border in (start, stop)):
                    return self._in_pieces(text, spans)
                raise BadRow(f"an answer does not decode back: {text[start:stop]!r:.60} became {shown!r:.60}")
            places += [first, last]
        return Encoded(np.array(ids, dtype=np.int32), _inside(len(ids), places))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def _first_from(offsets: Sequence[tuple[int, int]], text: str, border: int, opens: bool) -> int:
    """Number of the first token on the far side of a border: of a span where it opens, else of what follows.

    Tokens of no characters (a prefix that the tokenizer adds) belong to what precedes them. A token may
    swallow white space across the border (as Phi's <|end|> does) and yet belong to the span.
    """
    for number, (start, stop) in enumerate(offsets):
        if stop > start >= border:
            return number
        if start < border < stop:
            outside = text[start:border] if opens else text[border:stop]
            if outside.isspace() is opens:
                return number
    return len(offsets)


def _inside(size: int, places: Sequence[int]) -> NDArray[np.bool_]:
    """[size] bool, true from each even place to the odd one after it."""
    supervised = np.zeros(size, dtype=np.bool_)
    for start, stop in zip(places[::2], places[1::2], strict=True):
        supervised[start:stop] = True
    return supervised


def _byte_borders(text: str, spans: Sequence[Span]) -> list[int]:
    """Places of the spans' ends in the UTF-8 bytes of the text."""
    if text.isascii():
        return [place for span in spans for place in span]
    borders, at, size = [], 0, 0
    for place in (place for span in spans for place in span):
        size += len(text[at:place].encode())
        at = place
        borders.append(size)
    return borders


def _cut(text: str, spans: Sequence[Span]) -> tuple[list[str], list[bool]]:
    """The text in pieces at the spans' borders, and which of the pieces are spans; empty ones left out."""
    pieces: list[str] = []
    marks: list[bool] = []
    at = 0
    for start, stop in [*spans, (len(text), len(text))]:
        for piece, mark in ((text[at:start], False), (text[start:stop], True)):
            if piece:
                pieces.append(piece)
                marks.append(mark)
        at = stop
    return pieces, marks


def _normalised(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
    """The text as the tokenizer's normalizer leaves it, piece by piece so that the spans stay known."""
    normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer else lambda piece: piece
    pieces, marks = _cut(text, spans)
    done: list[str] = []
    found: list[Span] = []
    size = 0
    for piece, mark in zip(pieces, marks, strict=True):
        done.append(normalize(piece))
        if mark:
            found.append((size, size + len(done[-1])))
        size += len(done[-1])
    return "".join(done), found


def byte_table(tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes that each id stands for; None when the tokenizer is not of the byte-level kind."""
    if tokenizer.decoder is None:
        return None
    decoder = json.loads(tokenizer.decoder.__getstate__())  # the whole tokenizer's would be many megabytes
    kinds = [each["type"] for each in decoder.get("decoders", [decoder]) if each]
    if kinds != ["ByteLevel"]:
        return None
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    table = [b""] * (1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0))
    for piece, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in added:
            table[number] = added[number].encode()
        elif all(letter in letters for letter in piece):
            table[number] = bytes(letters[letter] for letter in piece)
        else:
            return None
    return table


def _byte_letters() -> dict[int, str]:
    """Byte-level BPE writes each byte as a printable letter: itself where it is one, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{byte: chr(byte) for byte in printable},
        **{byte: chr(256 + n) for n, byte in enumerate(others)},
    }


def _end_tokens(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Texts of the tokens that end a turn: the tokenizer's end token and those that the model stops at."""
    found = [special_tokens(folder).get("eos_token")]
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        ids = value.get("eos_token_id", (value.get("text_config") or {}).get("eos_token_id"))
        for number in ids if isinstance(ids, list) else [ids]:
            found.append(tokenizer.id_to_token(number) if isinstance(number, int) else None)
    return list(dict.fromkeys(token for token in found if token))
