"""One line on a terminal that says what is being waited for, and vanishes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def wait_line(wanted: bool = True) -> Iterator[Callable[[str], None]]:
    """Call what it gives with the words to show; elsewhere than on a terminal it does nothing."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda words: None
        return
    from rich.console import Console
    from rich.text import Text

    from dflashctl.render.text import line

    with Console(stderr=True).status(Text("")) as status:
        yield lambda words: status.update(Text(line(words)))
