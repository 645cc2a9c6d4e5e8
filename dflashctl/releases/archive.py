"""The one archive of a deploy: contents named by their sha256, each once, read and sent as it goes.

A large archive is never a file here and never whole in memory: its size is known before its first byte.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dflashctl.releases.sources import Snapshot, SourceFile
from dflashctl.releases.walk import changed_while_read

COMPRESS_BELOW_BYTES = 16 << 20
"""Source code shrinks to a quarter; a large archive is weights, and gzip would be slower than the network."""

PIECE_BYTES = 1 << 20
END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Archive:
    """`pieces` come once, `size` bytes in all. Raises VerificationFailed while it is read, when a file is no
    longer what the snapshot saw."""

    size: int
    pieces: Iterable[bytes]


def pack(snapshot: Snapshot, files: Iterable[SourceFile]) -> Archive:
    """The contents of `files`, each once. Raises VerificationFailed as its pieces do."""
    by_content = {file.sha256: file for file in files}
    ordered = [by_content[sha] for sha in sorted(by_content)]
    plain = sum(_padded(file.size) + tarfile.BLOCKSIZE for file in ordered) + len(END)
    if plain >= COMPRESS_BELOW_BYTES:
        return Archive(plain, _tar(snapshot, ordered))
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as out:
        for piece in _tar(snapshot, ordered):
            out.write(piece)
    return Archive(buffer.tell(), [buffer.getvalue()])


def _tar(snapshot: Snapshot, files: list[SourceFile]) -> Iterator[bytes]:
    for file in files:
        info = tarfile.TarInfo(file.sha256)
        info.size, info.mode = file.size, 0o600
        yield info.tobuf(tarfile.GNU_FORMAT)
        yield from _content(snapshot, file)
        yield bytes(_padded(file.size) - file.size)
    yield END


def _content(snapshot: Snapshot, file: SourceFile) -> Iterator[bytes]:
    """Exactly `file.size` bytes that have its hash, or an error."""
    if file.content is not None:
        yield file.content
        return
    digest, left = hashlib.sha256(), file.size
    try:
        with (snapshot.root / file.path).open("rb") as source:
            while left and (data := source.read(min(PIECE_BYTES, left))):
                digest.update(data)
                left -= len(data)
                yield data
    except OSError as error:
        raise changed_while_read(file.path) from error
    if left or digest.hexdigest() != file.sha256:
        raise changed_while_read(file.path)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
