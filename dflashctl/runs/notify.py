"""Which looks at a host are news: finished, failed, wedged, lost; each once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflashctl.runs.news import News
from dflashctl.runs.status import Look, Row
from dflashctl.runs.vocabulary import State

NEWS: frozenset[State] = frozenset({"finished", "failed", "wedged", "lost"})
SURE_AFTER = 2
"""So many looks in a row must call a run wedged before anybody is disturbed."""


@dataclass
class Once:
    """Remembers what was told. What had ended before the first look is no news."""

    told: set[tuple[str, str]] = field(default_factory=set)
    wedged_looks: dict[str, int] = field(default_factory=dict)
    begun: bool = False
    before: set[str] = field(default_factory=set)
    """Runs (ids) that had ended before the first look."""

    def news(self, look: Look) -> list[News]:
        """A look without contact brings none: nothing is known then."""
        if look.contact != "ok":
            return []
        found = [self._of(look, row) for row in look.rows]
        self.begun = True
        return [each for each in found if each is not None]

    def _of(self, look: Look, row: Row) -> News | None:
        state, run_id = row.verdict.state, row.facts.id
        if row.verdict.ended and not self.begun:
            self.before.add(run_id)
        count = self.wedged_looks.get(run_id, 0) + 1 if state == "wedged" else 0
        self.wedged_looks[run_id] = count
        if state not in NEWS or (run_id, state) in self.told or (state == "wedged" and count < SURE_AFTER):
            return None
        self.told.add((run_id, state))
        if run_id in self.before:
            return None
        return News(look.host, run_id, row.facts.name, state, row.verdict.evidence, row.verdict.next)
