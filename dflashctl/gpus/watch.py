"""Look at the GPUs again and again; without contact, keep trying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from dflashctl.config.hosts import Host
from dflashctl.errors import ContainerDown, DflashError, Unreachable
from dflashctl.gpus.facts import read_facts
from dflashctl.gpus.idle import Box
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine

EVERY_S = 2.0
SLOWEST_S = 15.0


def watch(
    host: Host,
    *,
    every_s: float = EVERY_S,
    connect: Callable[[Host], Engine] = open_engine,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Box]:
    """For ever. The first look must succeed (Unreachable, ContainerDown otherwise); a later one that fails
    gives a Box whose `problem` says so, and is repeated on a new connection, after a growing pause."""
    engine: Engine | None = None
    failures, seen = 0, False
    try:
        while True:
            try:
                engine = engine or connect(host)
                box = read_facts(engine).box
                failures, seen = 0, True
            except (Unreachable, ContainerDown) as error:
                if not seen:
                    raise
                _close(engine)
                engine, failures = None, failures + 1
                box = Box((), f"no contact: {error.what}")
            yield box
            sleep(min(every_s * 2**failures, max(SLOWEST_S, every_s)))
    finally:
        _close(engine)


def _close(engine: Engine | None) -> None:
    if engine is not None:
        with suppress(DflashError, OSError):
            engine.close()
