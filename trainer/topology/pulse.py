"""Signs of life from the ranks to their launcher that no disk holds up, who has been quiet for too long, and
the one heartbeat that stands for all.

`heartbeat.json` is for everybody else: on a full disk it grows old although all is well. So each rank also
writes what the launcher decides by into memory that the launcher owns, and that goes with it.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

VARIABLE = "DFLASH_PULSES"  # where the ranks open the memory
RECORD = 1024  # bytes a rank
HEAD = 6  # checksum and length
LONGEST_LOOK_S = 1.0

Sign = dict[str, Any]
"""pid, start, phase, step, mono, deadline_s: what heartbeat.json has under these names."""


class Pulses:
    """The launcher's end: nameless memory, reached by the ranks through this process's descriptor."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._file = os.memfd_create("dflash-pulses")
        os.ftruncate(self._file, ranks * RECORD)
        self._memory = mmap.mmap(self._file, ranks * RECORD)
        self._latest: dict[int, Sign] = {}
        os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> dict[int, Sign]:
        """The latest sign of every rank that has given one. What is just being written counts next time."""
        for rank in range(self.ranks):
            record = self._memory[rank * RECORD : (rank + 1) * RECORD]
            length = int.from_bytes(record[4:HEAD], "little")
            body = record[HEAD : HEAD + length]
            if length and zlib.crc32(body) == int.from_bytes(record[:4], "little"):
                self._latest[rank] = {**json.loads(body), "rank": rank}
        return dict(self._latest)

    def close(self) -> None:
        os.environ.pop(VARIABLE, None)
        self._memory.close()
        os.close(self._file)


class Pulse:
    """A rank's end. Without a launcher that listens it does nothing."""

    def __init__(self, rank: int) -> None:
        self._memory: mmap.mmap | None = None
        self._at = rank * RECORD
        with suppress(KeyError, OSError, ValueError):
            file = os.open(os.environ[VARIABLE], os.O_RDWR)
            try:
                self._memory = mmap.mmap(file, 0)
            finally:
                os.close(file)

    def give(self, sign: Sign) -> None:
        if self._memory is None:
            return
        body = json.dumps(sign).encode()
        head = zlib.crc32(body).to_bytes(4, "little") + len(body).to_bytes(2, "little")
        self._memory[self._at : self._at + HEAD + len(body)] = head + body


class Quiet:
    """How long each rank has been quiet, in time that the launcher itself was awake and saw it.

    A container that was frozen, or a machine with far too much to do, holds up everybody: then the ranks'
    clocks say much, and nothing is wrong with them.
    """

    def __init__(self) -> None:
        self._looked: float | None = None
        self._last: dict[int, float] = {}  # rank -> mono of its latest sign
        self._quiet: dict[int, float] = {}

    def look(self, now: float, signs: Mapping[int, Sign]) -> dict[int, float]:
        """Ranks that have been quiet for longer than their phase allows -> for how long (s).

        Args:
            now: CLOCK_MONOTONIC, rising from look to look.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        for rank, sign in signs.items():
            if self._last.get(rank) == sign["mono"]:
                self._quiet[rank] += passed
            else:
                self._last[rank], self._quiet[rank] = sign["mono"], 0.0
        return {rank: quiet for rank, quiet in self._quiet.items() if quiet > signs[rank]["deadline_s"]}


def merged(beats: Sequence[dict[str, Any]], ranks: int) -> dict[str, Any] | None:
    """The run's heartbeat: as old as its oldest rank's, as far as its slowest; None until each has beaten.

    Args:
        beats: the ranks' heartbeats, in the order of ranks.
    """
    if len(beats) < ranks or not beats:
        return None
    # A rank that is done beats no more while the first one still measures.
    living = [beat for beat in beats if beat["phase"] != "done"] or list(beats)
    oldest = min(living, key=lambda beat: float(beat["mono"]))
    steps = [beat["step"] for beat in beats if beat["step"] is not None]
    first = beats[0]
    return {
        **first,
        "mono": oldest["mono"],
        "wall": oldest["wall"],
        "phase": oldest["phase"],
        "phase_since": oldest["phase_since"],
        "deadline_s": oldest["deadline_s"],
        "step": min(steps) if len(steps) == len(beats) else first["step"],
        "threads": {
            f"rank {rank} {name}": alive
            for rank, beat in enumerate(beats)
            for name, alive in beat["threads"].items()
        },
        "queues": {
            f"rank {rank} {name}": depth
            for rank, beat in enumerate(beats)
            for name, depth in beat["queues"].items()
        },
    }
