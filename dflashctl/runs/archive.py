"""The one archive of a deploy: contents named by their sha256, each once, never whole in memory."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Literal

from dflashctl.runs.sources import Snapshot, SourceFile, changed_while_read

COMPRESS_BELOW_BYTES = 16 << 20
"""Source code shrinks to a quarter; a large archive is weights, and gzip would be slower than the network."""


class HashingReader(io.RawIOBase):
    """Passes a file through and knows afterwards what went by."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def write_archive(snapshot: Snapshot, files: Iterable[SourceFile], target: Path) -> int:
    """Pack the contents of `files` into `target`; returns its size in bytes.

    Raises VerificationFailed when a file is no longer what the snapshot saw.
    """
    by_content = {file.sha256: file for file in files}
    total = sum(file.size for file in by_content.values())
    mode: Literal["w", "w:gz"] = "w:gz" if total < COMPRESS_BELOW_BYTES else "w"
    with tarfile.open(target, mode, format=tarfile.GNU_FORMAT) as tar:
        for sha, file in sorted(by_content.items()):
            info = tarfile.TarInfo(sha)
            info.size = file.size
            info.mode = 0o600
            _add(tar, info, snapshot, file)
    return target.stat().st_size


def _add(tar: tarfile.TarFile, info: tarfile.TarInfo, snapshot: Snapshot, file: SourceFile) -> None:
    if file.content is not None:
        tar.addfile(info, io.BytesIO(file.content))
        return
    try:
        with (snapshot.root / file.path).open("rb") as source:
            reader = HashingReader(source)
            tar.addfile(info, reader)
    except OSError as error:  # gone, or shorter than it was
        raise changed_while_read(file.path) from error
    if reader.digest.hexdigest() != file.sha256:
        raise changed_while_read(file.path)
