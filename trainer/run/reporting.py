"""Figures of the steps since the last report: recorded, shown, and what is wrong with them said."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from trainer.checkpoint.resume import Progress
from trainer.culprits import Who
from trainer.data.bad_rows import newly_bad
from trainer.errors import TrainerError
from trainer.machine import peaks
from trainer.process.runfiles import RunFiles
from trainer.process.trackers import Trackers
from trainer.run.console import Console, Standing
from trainer.run.progress import Clock, Tally
from trainer.sections import TrainConfig
from trainer.training.bad_steps import BadSteps
from trainer.words import duration


class Reporter:
    """What a run tells of its training, to people, files and trackers."""

    def __init__(
        self, config: TrainConfig, files: RunFiles, console: Console, trackers: Trackers, rows: int
    ) -> None:
        """rows: of the data. Call `start` before all else."""
        self.config, self.files, self.console, self.trackers = config, files, console, trackers
        self.rows = rows
        self.makers: dict[int, Who] = {}  # of the bad ones' states

    def start(self, progress: Progress, clock: Clock, bad_steps: BadSteps) -> None:
        """Training begins here; what was skipped before is not told again."""
        self.progress, self.clock, self.bad_steps = progress, clock, bad_steps
        self.told_bad_steps = bad_steps.total

    def record(self, metrics: dict[str, Any]) -> None:
        """Figures of the present step, for metrics.jsonl and trackers."""
        self.files.record(metrics)
        self.trackers.log(metrics, self.progress.step)

    def estimate(self) -> None:
        """Say how long the rest takes, as far as that is known."""
        step_s = self.files.pace.median_step_s
        left = self.clock.left_s(self.progress.step, step_s)
        if step_s is None or left is None:
            return
        steps = round(left / step_s)
        self.console.say(f"{step_s:.3f} s a step: {steps:,} more steps take about {duration(left)}")

    def report(self, since: Tally, norm: Tensor, factor: float) -> None:
        """Record and show `since`.

        Args:
            norm: of the latest gradient.
            factor: of the peak learning rate.
        Raises:
            TrainerError: the loss is not finite, or too many steps in a row had no finite gradient.
            DataError: the data has too many bad rows.
        """
        metrics = since.metrics()
        self.files.peaks = peaks()
        metrics["lr"] = self.config.optimizer.lr * factor
        metrics["grad_norm"] = round(float(norm), 4) if bool(norm.isfinite()) else None
        self.makers |= since.bad_makers
        new = newly_bad(
            since.bad_rows, self.progress.bad_rows, self.config.data.max_bad_rows, self.rows, self.makers
        )
        if new:
            self.progress.bad_rows += new
            self.console.say(f"rows {new} have non-finite hidden states and were skipped")
        step = self.progress.step
        if self._newly_skipped(metrics) == since.steps:
            return  # nothing was trained, so there are no figures
        if not math.isfinite(metrics["loss"]):
            raise TrainerError(
                f"loss {metrics['loss']} at step {step}",
                where="training",
                next="lower optimizer.lr, or start from the last checkpoint",
            )
        self.record(metrics)
        measured = self.progress.measured
        self.console.show(
            Standing(
                step=step,
                share=self.clock.progress(step),
                loss=metrics["loss"],
                acceptance_length=measured[-1][2] if measured else None,
                tokens_per_s=metrics["tokens_per_s"],
                eta_s=self.clock.left_s(step, self.files.pace.median_step_s),
                slots=" ".join(f"{value:.2f}" for value in metrics["slot_accuracy"]),
                lr=metrics["lr"],
            )
        )

    def _newly_skipped(self, metrics: dict[str, Any]) -> int:
        """How many steps were skipped since the last report; said. Raises TrainerError: too many in a row."""
        self.bad_steps.finish()
        new = self.bad_steps.total - self.told_bad_steps
        self.told_bad_steps = self.bad_steps.total
        if self.bad_steps.total:
            metrics["skipped_steps"] = self.bad_steps.total
        if new:
            self.console.say(f"WARNING: {new} steps with a non-finite gradient were skipped")
        return new
