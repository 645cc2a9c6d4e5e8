"""What was last seen of each host's live runs: a cache on the laptop, for when there is no contact.

It is never the truth: the truth is in the container. A cache that cannot be read or written is no error.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from dflashctl.runs.facts import listed, mapping, number, text, whole


@dataclass(frozen=True)
class Seen:
    """A run at the last contact. `at`: seconds since the epoch, by the laptop's clock."""

    id: str
    tag: str
    state: str
    step: int | None
    gpus: tuple[int, ...]
    at: float

    @property
    def words(self) -> str:
        return self.state if self.step is None else f"{self.state} at step {self.step:,}"


def cache_file(host: str) -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("dflashctl")) / "seen" / f"{host}.json"


def load(host: str, path: Path | None = None) -> list[Seen]:
    """The runs that were live at the last contact; [] when nothing is known."""
    try:
        document = mapping(json.loads((path or cache_file(host)).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    if document.get("version") != 1:
        return []
    seen = []
    for each in map(mapping, listed(document.get("runs"))):
        gpus = tuple(index for index in map(whole, listed(each.get("gpus"))) if index is not None)
        at = number(each.get("at"))
        if text(each.get("id")) and at is not None:
            seen.append(
                Seen(
                    text(each.get("id")),
                    text(each.get("tag")),
                    text(each.get("state")) or "unknown",
                    whole(each.get("step")),
                    gpus,
                    at,
                )
            )
    return seen


def store(host: str, seen: list[Seen], path: Path | None = None) -> None:
    """Replace the cache of a host, atomically: two commands at once leave one of the two, whole."""
    target = path or cache_file(host)
    body = {"version": 1, "host": host, "written_at": time.time(), "runs": [vars(each) for each in seen]}
    aside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(body), encoding="utf-8")
        aside.replace(target)
    except OSError:
        aside.unlink(missing_ok=True)
