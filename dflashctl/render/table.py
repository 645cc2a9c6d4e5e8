"""Small wrappers on rich: one console, one look for tables. No markup is parsed: a bracket is a bracket."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from dflashctl.render import text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

UNWRAPPED = 2000
"""Columns when the output is no terminal and COLUMNS is not set: one record stays one line for grep."""

STATE_STYLES = {
    "queued": "dim",
    "starting": "cyan",
    "compiling": "cyan",
    "running": "green",
    "slow": "yellow",
    "wedged": "bold red",
    "frozen": "bold yellow",
    "finished": "green",
    "failed": "bold red",
    "killed": "magenta",
    "cancelled": "magenta",
    "lost": "bold red",
    "unknown": "bold yellow",
}


def console(file: TextIO | None = None) -> Console:
    """A console for `file` (stdout by default) with markup, emoji codes and highlighting off."""
    import os

    from rich.console import Console

    stream = file or sys.stdout
    wide = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else UNWRAPPED
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=wide, legacy_windows=False)


def cell(value: object, style: str = "") -> Text:
    """Anything as a rich Text, escaped. Newlines stay (a cell may have several lines)."""
    from rich.text import Text

    return Text(text.block("-" if value is None else value), style=style)


def state(name: str) -> Text:
    """A run's state in its colour."""
    return cell(name, STATE_STYLES.get(name, ""))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A plain table without rules. A column name that starts with `>` is aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        right = column.startswith(">")
        last = position == len(columns) - 1
        made.add_column(
            column.lstrip(">"),
            justify="right" if right else "left",
            no_wrap=not last,
            overflow="fold" if last else "ellipsis",
        )
    for row in rows:
        made.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    return made


def show(renderable: object, file: TextIO | None = None) -> None:
    """Print a renderable; without a terminal, trailing padding is cut off every line."""
    stream = file or sys.stdout
    out = console(stream)
    if out.is_terminal:
        out.print(renderable)
        return
    stream.write(plain(renderable, out.width))
    stream.flush()


def plain(renderable: object, width: int = UNWRAPPED) -> str:
    """A renderable as text without colours, each line without trailing blanks."""
    from rich.console import Console

    buffer = io.StringIO()
    Console(
        file=buffer,
        markup=False,
        emoji=False,
        highlight=False,
        width=width,
        color_system=None,
        force_terminal=False,
    ).print(renderable)
    return "".join(each.rstrip() + "\n" for each in buffer.getvalue().splitlines())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout."""
    show(table(columns, rows))


def say(value: object = "", style: str = "", file: TextIO | None = None) -> None:
    """One or several escaped lines on stdout (or `file`)."""
    show(cell(value, style), file)


def warn(value: object) -> None:
    """A line on stderr."""
    say(value, "yellow", sys.stderr)


def pairs(rows: Iterable[tuple[str, object]]) -> Table:
    """Names and values, indented, without a header; each value is one line."""
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, style="dim")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(text.line(f"  {name}") if name else "", cell(text.line(value)))
    return made
