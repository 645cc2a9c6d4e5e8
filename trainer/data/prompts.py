"""Text of the standard library as prompts and as packed rows."""

from __future__ import annotations

import bisect
import random
import zlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trainer.data import stdlib
from trainer.data.packing import Document, Rows, pack
from trainer.errors import DataError

CHARACTERS_PER_TOKEN = 8  # generous: a slice of this many times the wanted tokens rarely falls short


def identity(held_out: bool) -> dict[str, Any]:
    """What the text is, for the record: a checksum over every file's path and content."""
    checksum, size = 0, 0
    paths = stdlib.files(held_out)
    for path in paths:
        content = path.read_bytes()
        size += len(content)
        name = path.relative_to(stdlib.root()).as_posix()
        checksum = zlib.crc32(content, zlib.crc32(name.encode(), checksum))
    return {"source": "stdlib", "files": len(paths), "bytes": size, "crc32": f"{checksum:08x}"}


def draw_prompts(tokenizer: Any, count: int, tokens: int, held_out: bool, seed: int) -> Tensor:
    """`count` different prompts [count, tokens] that begin at line starts, drawn uniformly over the text.

    Raises:
        DataError: the library's sources are not there, or too small.
    """
    texts = _texts(held_out)
    ends = list(accumulate(len(text) for text in texts))
    if not ends or not ends[-1]:
        raise DataError("no Python sources in the standard library's folder", where=str(stdlib.root()))
    generator = random.Random(seed)
    found: dict[tuple[int, ...], None] = {}  # in order, without repeats
    for _ in range(100 * count):
        if len(found) == count:
            break
        place = generator.randrange(ends[-1])
        which = bisect.bisect_right(ends, place)
        text = texts[which]
        start = text.rfind("\n", 0, place - ends[which] + len(text)) + 1
        ids = tokenizer.encode(
            text[start : start + CHARACTERS_PER_TOKEN * tokens], add_special_tokens=False
        ).ids
        if len(ids) > tokens:  # the last token may be cut; it is not used
            found[tuple(ids[:tokens])] = None
    if len(found) < count:
        raise DataError(
            f"only {len(found)} different prompts of {tokens} tokens in the standard library's sources",
            where=str(stdlib.root()),
            next="ask for fewer or shorter prompts",
        )
    return torch.tensor(list(found), dtype=torch.int64)


def packed_text(tokenizer: Any, rows: int, row_tokens: int, end_id: int | None, seed: int) -> Rows:
    """About `rows` rows of whole training files, packed, trained on throughout.

    Args:
        end_id: stands behind every file; None: nothing does.
    """
    end = [] if end_id is None else [end_id]
    order = stdlib.files(False)
    random.Random(seed).shuffle(order)
    documents, total = [], 0
    for path in order:
        ids = [*tokenizer.encode(stdlib.read(path), add_special_tokens=False).ids, *end]
        documents.append(Document(ids, [True] * len(ids)))
        total += len(ids)
        if total >= rows * row_tokens:
            break
    return pack(documents, row_tokens)[:rows]


def _texts(held_out: bool) -> list[str]:
    return [stdlib.read(path) for path in stdlib.files(held_out)]


def row_order(rows: int, seed: int) -> Callable[[int, int], Tensor]:
    """A fixed endless order of rows, each epoch a permutation of its own: (batch, size) -> indices [size]."""

    def batch(number: int, size: int) -> Tensor:
        wanted = range(number * size, (number + 1) * size)
        epochs = {place // rows for place in wanted}
        permutations = {
            epoch: torch.randperm(rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
            for epoch in epochs
        }
        return torch.stack([permutations[place // rows][place % rows] for place in wanted])

    return batch
