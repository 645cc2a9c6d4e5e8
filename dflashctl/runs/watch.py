"""Look again and again until the watched runs have ended; without contact, keep trying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from dflashctl.config.hosts import Host
from dflashctl.errors import ContainerDown, Unreachable
from dflashctl.remote.again import let_go, pause_s
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine
from dflashctl.runs.status import Look, Memory, look, without_contact

EVERY_S = 2.0


def watch(
    host: Host,
    *,
    tag: str | None = None,
    every_s: float = EVERY_S,
    connect: Callable[[Host], Engine] = open_engine,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Look]:
    """Looks, until every run in them has ended. A tag means the run that has it at the first look.

    The first look must succeed (Unreachable, ContainerDown otherwise); later ones that fail show the runs as
    `unknown` or `frozen` and are repeated on a new connection, after a growing pause.
    """
    memory, run_id, failures = Memory(), None, 0
    engine: Engine | None = None
    try:
        while True:
            try:
                engine = engine or connect(host)
                wanted = None if run_id else tag
                seen = look(engine, tag=wanted, run_id=run_id, memory=memory)
                failures = 0
            except (Unreachable, ContainerDown) as error:
                if memory.last is None:
                    raise
                let_go(engine)
                engine, failures = None, failures + 1
                seen = without_contact(host, error, memory)
            if tag is not None and run_id is None and seen.rows:
                run_id = seen.rows[0].facts.id
            yield seen
            if seen.contact == "ok" and not seen.live:
                return
            sleep(pause_s(failures, every_s))
    finally:
        let_go(engine)
