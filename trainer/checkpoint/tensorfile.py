"""Tensors in a safetensors file, streamed: hashed while written, and never a second time in memory.

The package's own `save_file` copies every tensor into bytes first and reports a full disk as an error of its
own kind; reading is left to it. The format: 8 bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
PIECE_BYTES = 1 << 24


def before_piece() -> None:
    """Called before each piece is written: where tests let a disk be full, or slow."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors that are in host memory to a new file, down to the disk; its sha256.

    Raises:
        OSError: as the write, or the flush to disk, gave it.
    """
    return write_pieces(path, _pieces(tensors))


def write_pieces(path: Path, pieces: Iterator[bytes | memoryview]) -> str:
    """Write a new file piece by piece, down to the disk; its sha256. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in pieces:
            before_piece()
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of 8
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(whole), PIECE_BYTES):
            yield whole[start : start + PIECE_BYTES]
