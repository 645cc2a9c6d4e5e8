"""The training loop: steps, and when to report, to measure and to save between them.

Which rows a step reads, their anchors and noise are functions of seed, step and place in the batch. So a
run that goes on from a checkpoint does what it would have done, on however many processes.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from trainer.checkpoint.resume import Progress
from trainer.checkpoint.writer import Writer
from trainer.data.dataset import Dataset
from trainer.errors import Stopped
from trainer.evaluation.evaluator import Evaluator
from trainer.process.runfiles import RunFiles
from trainer.process.trackers import Trackers
from trainer.run.agreement import Agreement
from trainer.run.console import Console
from trainer.run.looks import Looks
from trainer.run.progress import Clock, Every, Tally
from trainer.run.rehearsal import prepare
from trainer.run.reporting import Reporter
from trainer.run.saver import Saver
from trainer.run.setup import Assembled
from trainer.sections import TrainConfig
from trainer.topology.build import make_work
from trainer.topology.ranks import Ranks
from trainer.topology.together import LONG_S
from trainer.topology.work import Bad, Work
from trainer.training.bad_steps import BadSteps
from trainer.training.loss import Sums
from trainer.training.optim import DrafterOptimizer
from trainer.training.schedule import lr_factor
from trainer.training.step import DrafterStep
from trainer.words import plural

SAVE_RESERVE_S = 3.0
AFTER_SHARE = 0.10  # of the whole run's time: the most that measuring the trained drafter may take
ESTIMATE_AFTER = 10  # steps


class Trainer:
    """One run's training. `progress` is where it stands."""

    def __init__(
        self,
        config: TrainConfig,
        files: RunFiles,
        console: Console,
        parts: Assembled,
        data: Dataset,
        optimizer: DrafterOptimizer,
        evaluator: Evaluator | None,
        facts: dict[str, Any],
        trackers: Trackers,
        ranks: Ranks | None = None,
    ) -> None:
        """
        Args:
            facts: for trainer.json: recipe, target, data, code.
            ranks: of a run of several processes; the first measures, saves and reports for all.
        """
        self.config, self.files, self.console, self.parts = config, files, console, parts
        self.data, self.optimizer, self.evaluator, self.facts = data, optimizer, evaluator, facts
        self.ranks = ranks
        width = config.objective.anchors_per_row
        self.width = width or data.needed_width(config.objective.anchors_per_document)
        self.step = DrafterStep(parts.drafter, parts.target, config, self.width)
        self.order = data.order(config.seed)
        warmup = config.schedule.warmup_steps
        if warmup is None:
            warmup = 20 if config.budget.steps is None else math.ceil(0.04 * config.budget.steps)
        self.warmup = warmup
        self.progress = Progress()
        self.clock = Clock(config.budget.steps, None, time.monotonic())
        self.writer = Writer(files.folder / "checkpoints", config.checkpoint.keep, self.saves)
        self.bad_steps = BadSteps(config.optimizer.max_bad_steps)
        self.reporter = Reporter(config, files, console, trackers, len(data.rows))
        self.reporter.start(self.progress, self.clock, self.bad_steps)
        self.looks = Looks(config, files, parts, evaluator, self.say, self.reporter.record)
        self.work: Work | None = None  # from `start` on
        self.first_step = 0  # of this life of the run
        self.saver = Saver(files, self.writer, parts.drafter, optimizer, self.say, self.reporter.record)
        self.agreement: Agreement | None = None  # where the optimizer is shared out

    @property
    def say(self) -> Any:
        return self.console.say

    @property
    def saves(self) -> bool:
        """One rank saves for all: what each has, or what was put together from all."""
        return self.ranks is None or self.ranks.first

    # Before the first step

    def prepare(self) -> None:
        """Self-check, memory, disk. Leaves weights and moments as they were.

        Raises:
            Refused: with the figure that fails. DataError: the data has too many bad rows.
        """
        prepare(
            self.config, self.parts, self.data, self.order, self.step, self.optimizer, self.writer, self.say
        )
        self.looks.prepare()
        if self.config.execution == "captured" and not self.optimizer.capturable:
            reason = "needs other ranks" if self.optimizer.share else "is Muon's, whose rate is the host's"
            self.say(f"captured: the update stays eager, for it {reason}")

    # Training

    def start(self, progress: Progress, seconds: float | None) -> None:
        """Set the clock.

        Args:
            progress: where the run stands; of a checkpoint, or new.
            seconds: that training may take from now on; None: as long as its steps take.
        """
        self.progress, self.first_step = progress, progress.step
        self.bad_steps = BadSteps(self.config.optimizer.max_bad_steps, *progress.bad_steps)
        self.files.step = progress.step or None
        self.saver.start(progress)
        total = None if seconds is None else progress.elapsed_s + seconds
        self.clock = Clock(self.config.budget.steps, total, time.monotonic() - progress.elapsed_s)
        self.reporter.start(progress, self.clock, self.bad_steps)
        self.work = make_work(
            self.config,
            self.files,
            self.say,
            self.parts.target,
            self.data,
            self.order,
            self.step,
            self.first_step,
            self.ranks,
            self.optimizer,
        )
        if self.optimizer.share is not None and self.ranks is not None:
            self.agreement = Agreement(self.files, self.ranks, self.saver, self._facts)

    def close(self) -> None:
        """End what training started."""
        if self.work is not None:
            self.work.close()
        self.writer.close()

    def train(self) -> None:
        """Train until the budget is used up. Raises Stopped, TrainerError."""
        config, progress = self.config, self.progress
        self.parts.drafter.train()
        left = (
            plural(config.budget.steps - progress.step if config.budget.steps else 0, "step")
            if self.clock.seconds is None
            else f"{self.clock.seconds - self.clock.elapsed_s:.0f} s"
        )
        if self.clock.progress(progress.step) >= 1.0:
            self.say(f"all {progress.step} steps are done: only what was trained is measured")
        else:
            batch = f"{plural(config.batch_rows, 'row')} a step, {plural(self.width, 'anchor')} a row"
            self.say(f"training for {left}: {batch}")
        section = config.evaluate
        looks = Every(section.every_steps, section.every_s)
        matches = Every(section.prefix_every_steps, section.prefix_every_s)
        saves = Every(config.checkpoint.every_steps, config.checkpoint.every_s)
        reports = Every(None, config.report_every_s)
        since, save_wanted = Tally(), False
        if progress.step and self.clock.progress(progress.step) < 0.95:
            # Where a stop came before them; what has been measured is not again.
            if looks.due(progress.step):
                self.look()
            elif matches.due(progress.step):
                self._match()
        while (share := self._share()) < 1.0:
            factor = lr_factor(config.schedule, progress.step, share, self.warmup)
            sums, norm, bad = self.one_step(progress.step, factor)
            progress.step += 1
            progress.elapsed_s = self.clock.elapsed_s
            since.add(sums, config.batch_tokens, bad, norm)
            share = self.clock.progress(progress.step)
            self.files.total_steps = self.clock.expected_steps(progress.step)
            self.files.queues = self.work.depths() if self.work else {}
            try:
                with self._holding():
                    self.files.stepped(progress.step)
            except Stopped:  # this step is in the checkpoint that will be saved, so also in the figures
                self.reporter.report(since, norm, factor)
                raise
            if progress.step - self.first_step == ESTIMATE_AFTER:
                self.reporter.estimate()
            if reports.due(progress.step) or share >= 1.0 or self._stopping:
                self.reporter.report(since, norm, factor)
                reports.done()
                since = Tally()
            if looks.due(progress.step) and share < 0.95:
                self.look()
                looks.done()
                matches.done()
            elif matches.due(progress.step) and share < 0.95:
                self._match()
                matches.done()
            save_wanted = save_wanted or saves.due(progress.step)
            there = self.saver.step == progress.step  # looked at just now, and at its best
            if save_wanted and (there or not self.writer.busy):
                if self.agreement is not None:
                    self.agreement.wanted = True
                elif self.saves:
                    self.saver.begin(progress, self._facts())
                saves.done()
                save_wanted = False
            self.saver.hear()
        if looks.ever:
            self.look()
        self.console.close()
        if self.agreement is not None and self.agreement.stop:
            raise self.agreement.stop

    @property
    def _stopping(self) -> bool:
        """Whether a request to stop waits for the next step to begin."""
        return self.agreement is not None and self.agreement.stop is not None

    def _holding(self) -> AbstractContextManager[None]:
        return self.agreement.holding() if self.agreement is not None else nullcontext()

    def one_step(self, number: int, factor: float) -> tuple[Sums, Tensor, Bad | None]:
        """One optimizer step: the loss sums, the gradient's norm, and which rows are bad.

        Args:
            number: the step, from 0.
            factor: of the peak learning rate.
        """
        assert self.work is not None
        sums, bad = self.work.gradients(number)
        norm = self.optimizer.step(factor, sums.weight, self.step.execution.update)
        self.work.updated()
        self.bad_steps.saw(number, norm, self.work.culprits())
        return sums, norm, bad

    def _share(self) -> float:
        """How much of training is over: by the first rank's clock, where there are several."""
        share = self.clock.progress(self.progress.step)
        if self.ranks is None:
            return share
        if self.agreement is not None:
            return self.agreement.begin(share, self.progress)
        # Before it the first rank may have measured for long.
        return self.ranks.from_first([share], f"step {self.progress.step} to begin", LONG_S)[0]

    def look(self) -> None:
        """Real decoding of a few prompts. The best checkpoint follows it: an improvement is saved."""
        assert self.work is not None
        measured = False
        with self._holding(), self.work.quiet():
            measured = self.looks.look(self.progress, self.step)
            self.progress.matched = self.progress.step
        if measured and self.agreement is not None:
            self.agreement.keep_best(self.progress)
        elif measured and self.saves:
            self.saver.keep_best(self.progress, self._facts())

    def _match(self) -> None:
        assert self.work is not None
        if self.progress.matched != self.progress.step:
            with self._holding(), self.work.quiet():
                self.looks.match(self.step)
                self.progress.matched = self.progress.step

    # Saving

    def _facts(self) -> dict[str, Any]:
        """trainer.json of now. Raises TrainerError: too many bad steps in a row."""
        self.bad_steps.finish()
        self.progress.bad_steps = self.bad_steps.total, self.bad_steps.in_a_row
        return {
            **self.facts,
            **self.progress.to_json(self.config.batch_rows, len(self.data.rows), self.warmup),
        }

    def save(self) -> None:
        """Write a checkpoint of the present step, and wait until it is on disk. Raises as `Saver.save`."""
        with self._holding():
            self.files.enter("saving")
        if self.agreement is not None:
            self.agreement.last(self.progress)
        if self.saves:
            self.saver.save(self.progress, self._facts())
