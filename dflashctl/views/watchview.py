"""The two faces of `status --watch`: a live table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from dflashctl.render import table
from dflashctl.runs.status import Look, Row
from dflashctl.views import status as view

PROGRESS_EVERY_S = 10.0
"""Without a terminal, steps alone make a line at most so often."""

SILENCE_S = 30.0
"""A sign of life where nothing changes: an evaluation, a long compile."""


class Live:
    """Redraws the overview in place. At the end it vanishes, for the caller to print the last word; when
    interrupted, the last table stays."""

    def __init__(self) -> None:
        from rich.live import Live as RichLive

        self._live = RichLive(console=table.console(), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.transient = kind is None
        self._live.__exit__(kind, error, trace)

    def update(self, look: Look) -> None:
        self._live.update(view.overview(look), refresh=True)


class Lines:
    """Says what is new: another state or phase at once, steps now and then."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, ...]] = {}
        self._steps: dict[str, tuple[int | None, float]] = {}

    def update(self, look: Look) -> None:
        for row in look.rows:
            if self._news(row, time.monotonic()):
                table.say(view.change_line(row, time.strftime("%H:%M:%S")))

    def _news(self, row: Row, now: float) -> bool:
        beat = row.facts.heartbeat
        state = (row.verdict.state, beat.phase if beat else "")
        first = row.facts.id not in self._said
        step, at = self._steps.get(row.facts.id, (None, now))
        changed = self._said.get(row.facts.id) != state
        patience = PROGRESS_EVERY_S if row.facts.step != step else SILENCE_S
        if not changed and (row.verdict.ended or now - at < patience):
            return False
        self._said[row.facts.id] = state
        self._steps[row.facts.id] = (row.facts.step, now)
        # What had ended before the watch began is no news.
        return not (first and row.verdict.ended)
