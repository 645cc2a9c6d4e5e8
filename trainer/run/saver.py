"""When a run's checkpoints are begun, and what is said of how they ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint import files as checkpoint
from trainer.checkpoint.resume import Progress
from trainer.checkpoint.writer import Writer
from trainer.errors import TrainerError
from trainer.model.drafter import Drafter
from trainer.process.runfiles import RunFiles
from trainer.training.optim import DrafterOptimizer
from trainer.writing import FULL


class Saver:
    """Saves the drafter as it is: in the background, or waiting for it."""

    def __init__(
        self,
        files: RunFiles,
        writer: Writer,
        drafter: Drafter,
        optimizer: DrafterOptimizer,
        say: Callable[[str], None],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        """record: of figures."""
        self.files, self.writer, self.drafter, self.optimizer = files, writer, drafter, optimizer
        self.say, self.record = say, record
        self.step: int | None = None  # the latest that is on disk, or on its way
        self.failed = 0
        self.best_after = 0
        self._told: set[Path] = set()

    def start(self, progress: Progress) -> None:
        """Begin where the run stands; one that goes on in a new folder has no best one there yet."""
        here = (self.writer.root / checkpoint.folder_name(progress.step)).is_dir()
        self.step = progress.step if here else None
        self.best_after = 0 if here else progress.step

    def at_its_best(self, progress: Progress) -> bool:
        """Was the drafter measured just now, and better than ever in this folder?"""
        measured = [each for each in progress.measured if each[0] > self.best_after]
        if not measured or measured[-1][0] != progress.step:
            return False
        return all(measured[-1][2] > real for _, _, real in measured[:-1])

    def begin(self, progress: Progress, facts: dict[str, Any]) -> None:
        """Write a checkpoint in the background, unless this step's is there. No other may be under way."""
        if self.step != progress.step:
            best = self.at_its_best(progress)
            self.writer.start(progress.step, self.drafter, self.optimizer, facts, best)
            self.step = progress.step

    def keep_best(self, progress: Progress, facts: dict[str, Any]) -> None:
        """If the drafter is at its best, have its checkpoint, and the link to it. Raises Stopped."""
        if not self.at_its_best(progress):
            return
        self.writer.finish(self.files.beat)
        self.hear()
        self.found_best(progress)
        self.begin(progress, facts)

    def found_best(self, progress: Progress) -> None:
        """This step is the best, so if its checkpoint was written before that was known, it is linked, and
        to be written anew: who goes on from it would take a worse one for the best, and remove it.
        """
        if self.step == progress.step:
            self.mark_best(progress.step)
            self.step = None

    def mark_best(self, step: int) -> None:
        """Point `best` at this step's checkpoint; a folder that takes no link costs only that."""
        root = self.writer.root
        try:
            checkpoint.mark_best(root, root / checkpoint.folder_name(step))
        except OSError as problem:
            self._tell_left({root / checkpoint.BEST: problem})

    def _tell_left(self, left: Mapping[Path, OSError]) -> None:
        """Once each, what could not be replaced or removed."""
        for path in [each for each in left if each not in self._told]:
            self._told.add(path)
            what = "be set" if path.name == checkpoint.BEST else "be removed, and stays"
            text = f"{path} cannot {what}: {left[path].strerror or left[path]}"
            self.say(f"WARNING: {text}")
            self.files.note(text)

    def hear(self) -> OSError | None:
        """Say how background writes ended. The disk's faults are survived; the latest is returned."""
        problem = None
        for step, outcome in self.writer.outcomes():
            if isinstance(outcome, Path):
                self.say(f"saved {outcome}")
                continue
            problem = outcome
            self.failed += 1
            if self.step == step:
                self.step = None
            text = f"the checkpoint of step {step} could not be written: {outcome.strerror or outcome}"
            self.say(f"WARNING: {text}; earlier ones stand, and the next is tried in its turn")
            self.files.note(text)
            self.record({"failed_checkpoints": self.failed})
        self._tell_left(self.writer.left)
        return problem

    def save(self, progress: Progress, facts: dict[str, Any]) -> None:
        """Write a checkpoint, and wait until it is on disk.

        Raises:
            TrainerError: it could not be written. Stopped: a signal came meanwhile; it is written.
        """
        self.writer.finish(self.files.beat)
        self.hear()
        self.begin(progress, facts)
        try:
            self.writer.finish(self.files.beat)
        finally:
            problem = self.hear()
        if problem is not None:
            full = problem.errno in FULL
            mend = "make room there" if full else "see whose it is (ls -ld) and how it is mounted"
            raise TrainerError(
                f"the checkpoint of step {progress.step} could not be written: {problem.strerror or problem}",
                where=str(self.writer.root),
                next=f"{mend}, then resume from the checkpoint before it",
            )
