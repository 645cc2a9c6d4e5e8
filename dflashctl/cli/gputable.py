"""The table of GPUs with its warnings, as `gpu` shows it and a refused launch does."""

from __future__ import annotations

from typing import TextIO

from dflashctl.gpus.idle import Box


def print_gpus(box: Box, file: TextIO | None = None) -> None:
    """On stdout by default; warnings on stderr."""
    from dflashctl.gpus.show import COLUMNS, rows
    from dflashctl.render.table import show, table, warn

    if box.gpus:
        show(table(COLUMNS, rows(box)), file)
    for warning in box.warnings:
        warn(f"warning: {warning}")
