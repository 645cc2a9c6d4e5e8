"""Look at the GPUs again and again; without contact, keep trying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from dflashctl.config.hosts import Host
from dflashctl.errors import ContainerDown, Unreachable
from dflashctl.gpus.facts import read_facts
from dflashctl.gpus.idle import Box
from dflashctl.remote.again import let_go, pause_s
from dflashctl.remote.engine import Engine
from dflashctl.remote.factory import open_engine

EVERY_S = 2.0


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
                let_go(engine)
                engine, failures = None, failures + 1
                box = Box((), f"no contact: {error.what}")
            yield box
            sleep(pause_s(failures, every_s))
    finally:
        let_go(engine)
