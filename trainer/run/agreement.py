"""Ranks that own a share of the optimizer each stop and save at the same step, for what is saved lies on all.

What the first rank wants is told to the others where a step begins. A request to stop waits until then; one
that comes of another rank's failure does not.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.checkpoint.optimizer_state import give
from trainer.checkpoint.resume import Progress
from trainer.errors import Stopped
from trainer.process.runfiles import RunFiles
from trainer.run.saver import Saver
from trainer.topology.ranks import Ranks
from trainer.topology.together import LONG_S


class Agreement:
    """One rank's side of it. `stop` is a request that waits."""

    def __init__(
        self, files: RunFiles, ranks: Ranks, saver: Saver, facts: Callable[[], dict[str, Any]]
    ) -> None:
        """facts: trainer.json of now."""
        self.files, self.ranks, self.saver, self.facts = files, ranks, saver, facts
        self.stop: Stopped | None = None
        self.wanted = False
        ranks.beat_with(self._beat)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A request to stop that comes inside waits. Raises Stopped: a peer has failed."""
        try:
            yield
        except Stopped as stop:
            if self.files.failed_peer() is not None:
                raise
            self.stop = stop

    def _beat(self) -> None:
        with self.holding():
            self.files.beat()

    def begin(self, share: float, progress: Progress) -> float:
        """A step begins: the first rank's share of the run that is over, after saving if it wants to.

        Raises:
            Stopped: the first rank was asked to stop. PeerLost.
        """
        wish = [
            share,
            self.stop.exit_code if self.stop else 0,
            self.wanted and self.saver.step != progress.step,
        ]
        share, stop, saves = self.ranks.from_first(wish, f"step {progress.step} to begin", LONG_S)
        if saves:
            self._save(progress)
        self.wanted = False
        if stop:
            raise self.stop or Stopped(signal.Signals(int(stop) - 128).name, int(stop))
        return share

    def keep_best(self, progress: Progress) -> None:
        """On the first rank: the drafter's checkpoint and the link to it, if it is at its best."""
        if not self.saver.at_its_best(progress):
            return
        self._heard()
        self.saver.found_best(progress)
        self.wanted = True

    def last(self, progress: Progress) -> None:
        """Training has ended: begin the checkpoint of this step, unless it is there. Raises PeerLost."""
        if self.ranks.first:
            self._heard()
        wanted = self.saver.step != progress.step
        if self.ranks.from_first([wanted], "the last checkpoint", LONG_S)[0]:
            self._save(progress)

    def _save(self, progress: Progress) -> None:
        if not self.ranks.first:
            give(self.saver.optimizer)
            return
        self._heard()
        self.saver.begin(progress, self.facts())

    def _heard(self) -> None:
        """Nothing is being written any more."""
        with self.holding():
            self.saver.writer.finish(self.files.beat)
        self.saver.hear()
