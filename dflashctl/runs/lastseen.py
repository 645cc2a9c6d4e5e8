"""What was last seen of each host's live runs: a cache on the laptop, for when there is no contact.

It is never the truth: the truth is in the container. A cache that cannot be read or written is no error.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from dflashctl.config.hosts import Host
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


def cache_file(host: Host) -> Path:
    """By the name and by where that is: another project's hosts.yaml may call another machine the same."""
    import platformdirs

    place: list[object] = [host.engine, host.container, host.state_dir]
    if host.engine == "lab":
        from dflashctl.lab.state import lab_dir

        place = ["lab", str(lab_dir())]
    elif host.ssh is not None:
        place += [host.ssh.host, host.ssh.user, host.ssh.port]
    mark = zlib.crc32(json.dumps(place).encode())
    return Path(platformdirs.user_cache_dir("dflashctl")) / "seen" / f"{host.name}-{mark:08x}.json"


def load(host: Host, path: Path | None = None) -> list[Seen]:
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


def forget(host: Host, run_id: str) -> None:
    """A run that was seen to end is not shown as last seen alive."""
    seen = load(host)
    left = [each for each in seen if each.id != run_id]
    if left != seen:
        store(host, left)


def store(host: Host, seen: list[Seen], path: Path | None = None) -> None:
    """Replace the cache of a host, atomically: two commands at once leave one of the two, whole."""
    target = path or cache_file(host)
    body = {"version": 1, "host": host.name, "written_at": time.time(), "runs": [vars(each) for each in seen]}
    aside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(body), encoding="utf-8")
        aside.replace(target)
    except OSError:  # it is a cache: a home that is read-only, or no folder, hides no run
        with contextlib.suppress(OSError):
            aside.unlink()
