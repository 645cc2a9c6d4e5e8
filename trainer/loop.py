"""The training loop: steps, what is measured and saved between them, and what is checked before the first.

Which rows a step reads, their anchors and noise are functions of seed, step and place in the batch. So a
run that goes on from a checkpoint does what it would have done, on however many processes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import checkpoint, preflight
from trainer.bad_rows import newly_bad
from trainer.checkpoint_writer import Writer
from trainer.config import TrainConfig
from trainer.console import Console, Standing, duration
from trainer.data.dataset import Dataset
from trainer.errors import DataError, Stopped, TrainerError
from trainer.evaluate import Evaluator
from trainer.held_out import HeldOut, Matched, leak
from trainer.loss import Sums
from trainer.objective import draw
from trainer.optim import BadSteps, DrafterOptimizer, lr_factor
from trainer.optimizer_state import forget, moments
from trainer.progress import Clock, Every, Tally
from trainer.resume import Progress
from trainer.runfiles import RunFiles
from trainer.selfcheck import check
from trainer.setup import Assembled
from trainer.step import Batch, DrafterStep
from trainer.topology.build import make_work
from trainer.topology.ranks import Ranks
from trainer.topology.together import LONG_S
from trainer.topology.work import Bad, Work
from trainer.trackers import Trackers

SAVE_RESERVE_S = 3.0
AFTER_SHARE = 0.10  # of the whole run's time: the most that measuring the trained drafter may take
QUICK_TOKENS = 48  # of a measurement during training
ESTIMATE_AFTER = 10  # steps
TRIES = 8  # batches among which the self-check looks for one with something to train on


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
        self.trackers, self.ranks = trackers, ranks
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
        self.bad_steps, self.told_bad_steps = BadSteps(config.optimizer.max_bad_steps), 0
        self.held_out: HeldOut | None = None
        self.work: Work | None = None  # from `start` on
        self.first_step = 0  # of this life of the run
        self.saved_step: int | None = None
        self.failed_saves = 0
        self.best_after = 0  # a run that goes on in a new folder has no best one there yet

    @property
    def say(self) -> Any:
        return self.console.say

    @property
    def look_tokens(self) -> int:
        """Of each text that is measured during training."""
        return min(QUICK_TOKENS, self.config.evaluate.new_tokens)

    @property
    def saves(self) -> bool:
        """Every rank has the same weights and moments: one saves them."""
        return self.ranks is None or self.ranks.first

    @property
    def best(self) -> float:
        """The highest acceptance length by real decoding so far; 0 before the first."""
        return max((real for _, _, real in self.progress.measured), default=0.0)

    @property
    def at_its_best(self) -> bool:
        """Was the drafter measured just now, and better than ever in this folder?"""
        *before, last = [each for each in self.progress.measured if each[0] > self.best_after] or [
            (0, None, 0.0)
        ]
        return last[0] == self.progress.step and all(last[2] > real for _, _, real in before)

    # Before the first step

    def prepare(self) -> None:
        """Self-check, memory, disk. Leaves weights and moments as they were.

        Raises:
            Refused: with the figure that fails. DataError: the data has too many bad rows.
        """
        config = self.config
        on_host = self.parts.target.device.type == "cpu"
        preflight.check_host_memory(self.optimizer, on_host)
        self.say(
            preflight.check_disk(
                self.writer.root, config.checkpoint.keep, preflight.checkpoint_bytes(self.optimizer)
            )
        )
        batch, uniform = self._first_batch()
        size = config.micro_rows or config.batch_rows
        self.say(str(check(self.step, self.parts.target, batch.part(slice(0, size)), uniform[:size])))
        shape = f"{size} rows of {config.data.row_tokens} tokens with {self.step.pass_width} anchors each"
        with preflight.worst_case(shape):
            self._rehearse(batch.part(slice(0, size)), uniform[:size])
        self.say(preflight.peak(self.parts.target.device))
        if self.evaluator is not None:
            texts = [output.tokens for output in self.evaluator.own_greedy]
            count = config.evaluate.every_prompts
            size = self.parts.drafter.config.block_size
            self.held_out = HeldOut(
                self.parts.target, self.evaluator.prompts[:count], texts[:count], self.look_tokens, size
            )

    def _first_batch(self) -> tuple[Batch, Tensor]:
        """The first batch that has something to train on, with its numbers for drawing anchors."""
        config = self.config
        bad_rows: list[int] = []
        for number in range(TRIES):
            index = self.order(number, config.batch_rows)
            batch, bad = self.data.batch(index, self.parts.target)
            size = config.micro_rows or config.batch_rows
            uniform = draw((config.batch_rows, config.data.row_tokens), config.seed, number, 0)
            if bool(batch.rows[slice(0, size)].supervised.any()):
                return batch, uniform.to(self.parts.target.device)
            if bad is not None:
                found = index[bad.cpu()].tolist()
                bad_rows += newly_bad(found, bad_rows, config.data.max_bad_rows, len(self.data.rows))
        raise DataError("nothing to train on in the first batches", where="train.data", next="check the data")

    def _rehearse(self, batch: Batch, uniform: Tensor) -> None:
        """A whole step with every token trained on, and the copy for a checkpoint; then all is as it was."""
        drafter, copies = self.parts.drafter.train(), self.writer.copies
        rows = dataclasses.replace(batch.rows, supervised=torch.ones_like(batch.rows.supervised))
        before = checkpoint.take(0, drafter, self.optimizer, {}, keep=copies)
        copies.wait()
        sums = self.step.gradients(Batch(rows, batch.states), [uniform])
        self.optimizer.step(0.0, sums.weight)
        for name, tensor in moments(self.optimizer).items():
            copies(name, tensor)
        copies.wait()
        forget(self.optimizer, before.weights)
        checkpoint.restore_generators(before.state)

    # Training

    def start(self, progress: Progress, seconds: float | None) -> None:
        """Set the clock.

        Args:
            progress: where the run stands; of a checkpoint, or new.
            seconds: that training may take from now on; None: as long as its steps take.
        """
        self.progress, self.first_step = progress, progress.step
        self.files.step = progress.step or None
        here = self.writer.root / checkpoint.folder_name(progress.step)
        self.saved_step = progress.step if here.is_dir() else None
        self.best_after = 0 if here.is_dir() else progress.step
        total = None if seconds is None else progress.elapsed_s + seconds
        self.clock = Clock(self.config.budget.steps, total, time.monotonic() - progress.elapsed_s)
        self.work = make_work(
            self.config,
            self.files,
            self.say,
            self.parts,
            self.data,
            self.order,
            self.step,
            self.first_step,
            self.ranks,
        )

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
            f"{config.budget.steps - progress.step if config.budget.steps else 0} steps"
            if self.clock.seconds is None
            else f"{self.clock.seconds - self.clock.elapsed_s:.0f} s"
        )
        self.say(f"training for {left}: {config.batch_rows} rows a step, {self.width} anchors a row")
        section = config.evaluate
        looks = Every(section.every_steps, section.every_s)
        matches = Every(section.prefix_every_steps, section.prefix_every_s)
        saves = Every(config.checkpoint.every_steps, config.checkpoint.every_s)
        reports = Every(None, config.report_every_s)
        since, save_wanted = Tally(), False
        while (share := self._share()) < 1.0:
            factor = lr_factor(config.schedule, progress.step, share, self.warmup)
            sums, norm, bad = self.one_step(progress.step, factor)
            progress.step += 1
            progress.elapsed_s = self.clock.elapsed_s
            since.add(sums, config.token_budget, bad, norm)
            share = self.clock.progress(progress.step)
            self.files.total_steps = self._expected_steps()
            self.files.queues = self.work.depths() if self.work else {}
            try:
                self.files.stepped(progress.step)
            except Stopped:  # this step is in the checkpoint that will be saved, so also in the figures
                self._report(since, norm, factor)
                raise
            if progress.step - self.first_step == ESTIMATE_AFTER:
                self._estimate()
            if reports.due(progress.step) or share >= 1.0:
                self._report(since, norm, factor)
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
            if save_wanted and not self.writer.busy:
                self._save()
                saves.done()
                save_wanted = False
            self._hear_of_writes()
        if looks.ever:
            self.look()
        self.console.close()

    def one_step(self, number: int, factor: float) -> tuple[Sums, Tensor, Bad | None]:
        """One optimizer step: the loss sums, the gradient's norm, and which rows are bad.

        Args:
            number: the step, from 0.
            factor: of the peak learning rate.
        """
        assert self.work is not None
        sums, bad = self.work.gradients(number)
        norm = self.optimizer.step(factor, sums.weight)
        self.work.updated()
        self.bad_steps.saw(number, norm)
        return sums, norm, bad

    def _share(self) -> float:
        """How much of training is over: by the first rank's clock, where there are several."""
        share = self.clock.progress(self.progress.step)
        if self.ranks is None:
            return share
        # Before it the first rank may have measured for long.
        return self.ranks.from_first([share], f"step {self.progress.step} to begin", LONG_S)[0]

    def _expected_steps(self) -> int | None:
        if self.clock.seconds is None:
            return self.clock.steps
        step = self.progress.step
        return round(step / max(self.clock.progress(step), 1e-9))

    def _estimate(self) -> None:
        step_s = self.files.median_step_s
        left = self.clock.left_s(self.progress.step, step_s)
        if step_s is None or left is None:
            return
        steps = round(left / step_s)
        self.say(f"{step_s:.3f} s a step: {steps:,} more steps take about {duration(left)}")

    def _report(self, since: Tally, norm: Tensor, factor: float) -> None:
        metrics = since.metrics()
        metrics["lr"] = self.config.optimizer.lr * factor
        metrics["grad_norm"] = round(float(norm), 4) if bool(norm.isfinite()) else None
        self._tell_bad_steps(metrics)
        allowed, total = self.config.data.max_bad_rows, len(self.data.rows)
        new = newly_bad(since.bad_rows, self.progress.bad_rows, allowed, total)
        if new:
            self.progress.bad_rows += new
            self.say(f"rows {new} have non-finite hidden states and were skipped")
        step = self.progress.step
        if not math.isfinite(metrics["loss"]):
            raise TrainerError(
                f"loss {metrics['loss']} at step {step}",
                where="training",
                next="lower optimizer.lr, or start from the last checkpoint",
            )
        self._record(metrics)
        measured = self.progress.measured
        self.console.show(
            Standing(
                step=step,
                share=self.clock.progress(step),
                loss=metrics["loss"],
                acceptance_length=measured[-1][2] if measured else None,
                tokens_per_s=metrics["tokens_per_s"],
                eta_s=self.clock.left_s(step, self.files.median_step_s),
                slots=" ".join(f"{value:.2f}" for value in metrics["slot_accuracy"]),
                lr=metrics["lr"],
            )
        )

    def _tell_bad_steps(self, metrics: dict[str, Any]) -> None:
        """Skipped steps of this life of the run, when there are new ones. Raises TrainerError: too many."""
        self.bad_steps.finish()
        if self.bad_steps.total:
            metrics["skipped_steps"] = self.bad_steps.total
        if self.bad_steps.total > self.told_bad_steps:
            new = self.bad_steps.total - self.told_bad_steps
            self.say(f"WARNING: {new} steps with a non-finite gradient were skipped")
            self.told_bad_steps = self.bad_steps.total

    def _record(self, metrics: dict[str, Any]) -> None:
        self.files.record(metrics)
        self.trackers.log(metrics, self.progress.step)

    # Measuring on the way

    def _match(self) -> Matched | None:
        """Prefix-match on the held-out blocks, recorded."""
        if self.held_out is None or self.work is None:
            return None
        with self.work.quiet():
            self.parts.drafter.eval()
            matched = self.held_out.match(self.step)
            self.parts.drafter.train()
        self._record({"prefix_acceptance_length": round(matched.prefix, 4)})
        return matched

    def look(self) -> None:
        """Real decoding of a few prompts in the middle of training, beside prefix-match on the same prompts.

        Which checkpoint is the best follows it: an improvement is saved.
        """
        step, measured = self.progress.step, self.progress.measured
        if self.evaluator is None or (measured and measured[-1][0] == step):
            return
        assert self.work is not None
        matched = self._match()
        count = self.config.evaluate.every_prompts
        with self.work.quiet():
            self.parts.drafter.eval()
            length = self.evaluator.measure_greedy(self.parts.drafter, count, self.look_tokens)
            self.parts.drafter.train()
        measured.append((step, None if matched is None else matched.prefix, length))
        self._record({"acceptance_length": round(length, 4)})
        beside = "" if matched is None else f", prefix-match {matched.prefix:.2f}"
        self.say(
            f"step {step} acceptance length {length:.2f} "
            f"(first {self.look_tokens} tokens, few prompts){beside}"
        )
        warning = None if matched is None else leak(matched.promised, length)
        if warning:
            self.say(f"WARNING: {warning}")
            self.files.note(warning)
        if self.at_its_best:
            self.writer.finish(self.files.beat)
            self._hear_of_writes()
            if self.saved_step == step:
                checkpoint.mark_best(self.writer.root, self.writer.root / checkpoint.folder_name(step))
            self._save()

    # Saving

    def _save(self) -> None:
        """Begin to write a checkpoint of the present step, unless it is there."""
        step = self.progress.step
        if self.saved_step == step or not self.saves:
            return
        position = self.progress.to_json(self.config.batch_rows, len(self.data.rows), self.warmup)
        facts = {**self.facts, **position}
        self.writer.start(step, self.parts.drafter, self.optimizer, facts, self.at_its_best)
        self.saved_step = step

    def _hear_of_writes(self) -> OSError | None:
        """Say how background writes ended. The disk's faults are survived; the latest is returned."""
        problem = None
        for step, outcome in self.writer.outcomes():
            if isinstance(outcome, Path):
                self.say(f"saved {outcome}")
                continue
            problem = outcome
            self.failed_saves += 1
            if self.saved_step == step:
                self.saved_step = None
            text = f"the checkpoint of step {step} could not be written: {outcome.strerror or outcome}"
            self.say(f"WARNING: {text}; earlier ones stand, and the next is tried in its turn")
            self.files.note(text)
            self._record({"failed_checkpoints": self.failed_saves})
        return problem

    def save(self) -> None:
        """Write a checkpoint of the present step, and wait until it is on disk.

        Raises:
            TrainerError: it could not be written. Stopped: a signal came meanwhile; it is written.
        """
        self.files.enter("saving")
        self.writer.finish(self.files.beat)
        self._hear_of_writes()
        self._save()
        try:
            self.writer.finish(self.files.beat)
        finally:
            problem = self._hear_of_writes()
        if problem is not None:
            raise TrainerError(
                f"the checkpoint of step {self.progress.step} could not be written: "
                f"{problem.strerror or problem}",
                where=str(self.writer.root),
                next="make room there, then resume from the checkpoint before it",
            )
