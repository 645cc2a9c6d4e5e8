"""Small wrappers on rich: one console, one look for tables. No markup is parsed: a bracket is a bracket."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from dflashctl.render import text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

UNWRAPPED = 2000
"""Columns when the output is no terminal and COLUMNS is not set: one record stays one line for grep."""

LAST_COLUMN = 16
"""Room that the last column, which wraps, needs to be read as a column."""

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


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Listing:
    """A plain table without rules. A column name that starts with `>` is aligned to the right."""
    from rich.text import Text

    cells = [[value if isinstance(value, Text) else cell(value) for value in row] for row in rows]
    return Listing(columns, cells)


class Listing:
    """A table; where its columns have no room, each row is told in lines of its own: nothing is cut off."""

    def __init__(self, columns: Sequence[str], rows: list[list[Text]]) -> None:
        self.columns, self.rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.wide() if self.least_width() <= options.max_width else self.narrow()

    def least_width(self) -> int:
        """All columns whole, and room for some words in the last."""
        names = [column.lstrip(">") for column in self.columns]
        widths = [
            max(len(name), *(row[place].cell_len for row in self.rows if place < len(row)), 0)
            for place, name in enumerate(names)
        ]
        return sum(widths[:-1]) + 2 * (len(widths) - 1) + min(widths[-1], LAST_COLUMN)

    def wide(self) -> Table:
        from rich.table import Table

        made = Table(box=None, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for position, column in enumerate(self.columns):
            right = column.startswith(">")
            last = position == len(self.columns) - 1
            made.add_column(
                column.lstrip(">"),
                justify="right" if right else "left",
                no_wrap=not last,
                overflow="fold" if last else "ellipsis",
            )
        for row in self.rows:
            made.add_row(*row)
        return made

    def narrow(self) -> RenderableType:
        """The first two columns, below them what else there is by the name of its column, then the last."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        parts: list[RenderableType] = []
        for row in self.rows:
            head, rest, last = row[:2], row[2:-1], row[2:][-1:]
            parts.append(Text("  ").join(head))
            named = [
                Text.assemble((f"{column.lstrip('>').lower()} ", "dim"), value)
                for column, value in zip(self.columns[2:-1], rest, strict=False)
                if value.plain.strip() not in ("", "-")
            ]
            below = [Text(", ").join(named), *last] if named else last
            parts += [Padding(each, (0, 0, 0, 2)) for each in below if each.plain.strip()]
        return Group(*parts)


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
