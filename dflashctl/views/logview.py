"""A log on a terminal or in a pipe: each line escaped, the line that still grows kept live on a terminal."""

from __future__ import annotations

import shutil
from types import TracebackType
from typing import Self, TextIO

from dflashctl.logs.reading import Lines
from dflashctl.render.text import block, clip

CLEAR = "\r\x1b[K"


class View:
    """Takes bytes, prints lines. `collect`: keep the lines instead."""

    def __init__(self, out: TextIO, err: TextIO, *, collect: bool = False) -> None:
        self.lines: list[str] = []
        self.silent = True
        """Neither a byte of the log nor a word about it has come."""
        self._out = out
        self._err = err
        self._collect = collect
        self._terminal = out.isatty() and not collect
        self._parts = Lines()
        self._live_shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The last line may lack its end; a live line is left as a line."""
        self._print(list(self._parts.feed(b"", last=True)))
        self._out.flush()

    def data(self, data: bytes) -> None:
        self.silent = self.silent and not data
        self._print(list(self._parts.feed(data)))
        if self._terminal:
            self._show_live()
        self._out.flush()

    def notice(self, words: str) -> None:
        """Between the lines, on stderr: the log itself stays clean in a pipe."""
        self.silent = False
        self._hide_live()
        self._out.flush()
        self._err.write(f"-- {block(words)}\n")
        self._err.flush()

    def _print(self, lines: list[str]) -> None:
        if self._collect:
            self.lines += lines
            return
        if lines:
            self._hide_live()
            self._out.write("".join(block(each) + "\n" for each in lines))

    def _show_live(self) -> None:
        wanted = clip(self._parts.live.rstrip("\r"), shutil.get_terminal_size().columns - 1)
        if wanted != self._live_shown:
            self._out.write(CLEAR + wanted)
            self._live_shown = wanted

    def _hide_live(self) -> None:
        if self._live_shown:
            self._out.write(CLEAR)
            self._live_shown = ""
