"""A training run from beginning to end: load, make rows, measure, train, measure again, save.

All phases keep to the run's time budget, so a slow machine trains less instead of running late.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from torch import Tensor

from trainer import checkpoint
from trainer.config import TrainConfig
from trainer.data import dataset as datasets
from trainer.data.dataset import Dataset
from trainer.data.prompts import draw_prompts, row_order
from trainer.errors import DataError, Stopped, TrainerError
from trainer.evaluate import Evaluator, Measurement
from trainer.loss import Sums
from trainer.objective import draw, needed_width
from trainer.optim import DrafterOptimizer, lr_factor
from trainer.progress import Clock, Tally
from trainer.report import Report, make_report
from trainer.runfiles import RunFiles, write_json
from trainer.setup import Assembled, Say, assemble
from trainer.step import DrafterStep

SAVE_RESERVE_S = 3.0
BEFORE_SHARE = 0.05  # of the whole run's time: the most that measuring the untrained drafter may take
AFTER_SHARE = 0.10  # and the trained one; the last measurement stops there, wherever its texts are
QUICK_TOKENS = 48  # of a measurement during training


def run(config: TrainConfig, files: RunFiles, say: Say) -> Report | None:
    """Train as configured. Returns the report, None when the recipe evaluates nothing.

    Raises:
        TrainerError: with what to do; Stopped after saving, when a signal came.
    """
    files.enter("loading")
    parts = assemble(config, say)
    if config.topology != "colocated" or config.policy != type(config.policy)():
        say(f"topology {config.topology}: this version trains in one process, eagerly; policy is not used")
        files.note(f"topology {config.topology} asked for; trained colocated and eagerly")
    optimizer = DrafterOptimizer(parts.drafter, config.optimizer)
    _say_groups(optimizer, files, say)
    files.enter("data")
    data = datasets.build(config, parts.target, parts.tokenizer, say, files.beat)
    _say_data(data, say)
    evaluator, before = _measure_before(config, parts, files, say)
    trainer = Trainer(config, files, say, parts, data, optimizer, evaluator)
    files.enter("training")
    try:
        trainer.train()
    except Stopped:
        trainer.save()
        raise
    trainer.save()
    if evaluator is None:
        files.enter("done")
        return None
    files.enter("evaluating")
    parts.drafter.eval()
    total = config.budget.total_s
    limit = None if total is None else max(AFTER_SHARE / 2 * total, total - files.elapsed_s - SAVE_RESERVE_S)
    after = evaluator.measure(parts.drafter, limit_s=limit)
    report = make_report(config.evaluate, before, after, evaluator.lookup(), evaluator.repetition)
    best = max([after.greedy.acceptance_length, *trainer.quick])
    files.record({"acceptance_length": round(after.greedy.acceptance_length, 4)})
    files.summarise(
        report.headline, report.columns, report.rows, report.notes, report.lossless, round(best, 4)
    )
    files.enter("done")
    return report


def _say_groups(optimizer: DrafterOptimizer, files: RunFiles, say: Say) -> None:
    described = optimizer.describe()
    for group in optimizer.section.groups:
        mine = [each for each in described if each["group"] == group.name]
        names = sorted({str(each["parameter"]).split(".")[-2] for each in mine})
        rate = f"learning rate {optimizer.section.lr * group.lr_scale:g}, weight decay {group.weight_decay:g}"
        say(f"{group.name}: {group.algorithm}, {rate}, {len(mine)} parameters ({', '.join(names)})")
    write_json(files.folder / "parameters.json", {"parameters": described})


def _say_data(data: Dataset, say: Say) -> None:
    trained = int(data.rows.supervised.sum())
    say(
        f"data {len(data.rows):,} rows of {data.rows.tokens.shape[1]} tokens, {trained:,} trained on, "
        f"from {data.identity['files']} files, in {data.seconds:.1f} s"
    )
    if data.bad_rows:
        say(f"data: rows {data.bad_rows} have non-finite hidden states and are skipped")


def _measure_before(
    config: TrainConfig, parts: Assembled, files: RunFiles, say: Say
) -> tuple[Evaluator | None, Measurement | None]:
    section = config.evaluate
    if not section.prompts:
        return None, None
    files.enter("evaluating")
    prompts = draw_prompts(parts.tokenizer, section.prompts, section.prompt_tokens, True, config.seed)
    parts.drafter.eval()
    evaluator = Evaluator(
        parts.target,
        prompts.to(parts.target.device),
        section,
        config.drafter.block_size,
        files.beat,
    )
    total = config.budget.total_s
    limit = None if total is None else BEFORE_SHARE * total
    before = evaluator.measure(parts.drafter, section.prompts_before, limit)
    say(
        f"before training: acceptance length {before.greedy.acceptance_length:.2f} greedy, "
        f"{before.sampled.acceptance_length:.2f} sampled"
    )
    return evaluator, before


class Trainer:
    """The training loop."""

    def __init__(
        self,
        config: TrainConfig,
        files: RunFiles,
        say: Say,
        parts: Assembled,
        data: Dataset,
        optimizer: DrafterOptimizer,
        evaluator: Evaluator | None,
    ) -> None:
        self.config, self.files, self.say, self.parts = config, files, say, parts
        self.data, self.optimizer, self.evaluator = data, optimizer, evaluator
        width = config.objective.anchors_per_row
        self.width = width or needed_width(data.rows, config.objective.anchors_per_document)
        self.step = DrafterStep(parts.drafter, parts.target, config, self.width)
        self.order = row_order(len(data.rows), config.seed)
        self.clock = Clock(config.budget.steps, self._seconds(), time.monotonic())
        warmup = config.schedule.warmup_steps
        if warmup is None:
            warmup = 20 if config.budget.steps is None else math.ceil(0.04 * config.budget.steps)
        self.warmup = warmup
        self.done = 0
        self.bad_rows: list[int] = []
        self.quick: list[float] = []  # acceptance lengths during training
        self.saved_step: int | None = None

    def _seconds(self) -> float | None:
        """Time for training: its own budget, or less when the whole run's leaves less."""
        budget = self.config.budget
        if budget.total_s is None:
            return budget.train_s
        reserve = 0.0
        if self.evaluator:
            # More prompts than before training, but fewer passes: each accepts more tokens.
            reserve = min(1.5 * self.evaluator.last_s, AFTER_SHARE * budget.total_s)
        left = budget.total_s - self.files.elapsed_s - reserve - SAVE_RESERVE_S
        return max(1.0, left if budget.train_s is None else min(left, budget.train_s))

    def train(self) -> None:
        """Train until the budget is used up. Raises Stopped, TrainerError."""
        self.parts.drafter.train()
        budget = (
            f"{self.clock.seconds:.0f} s" if self.clock.seconds is not None else f"{self.clock.steps} steps"
        )
        self.say(f"training for {budget}: {self.config.batch_rows} rows a step, {self.width} anchors a row")
        reported, looked, saved = (time.monotonic(),) * 3
        since = Tally()
        while self.clock.progress(self.done) < 1.0:
            factor = lr_factor(self.config.schedule, self.done, self.clock.progress(self.done), self.warmup)
            sums, norm, bad = self.one_step(self.done, factor)
            self.done += 1
            since.add(sums, self.config.token_budget, bad)
            self.files.total_steps = self._expected_steps()
            self.files.stepped(self.done)
            now = time.monotonic()
            if now - reported >= self.config.report_every_s or self.clock.progress(self.done) >= 1.0:
                self._report(since, norm, factor)
                reported, since = now, Tally()
            every = self.config.evaluate.every_s
            if self.evaluator and every and now - looked >= every and self.clock.progress(self.done) < 0.95:
                self._look()
                looked = time.monotonic()
            every = self.config.checkpoint.every_s
            if every and now - saved >= every:
                self.save()
                self.files.enter("training")
                saved = time.monotonic()

    def one_step(self, number: int, factor: float) -> tuple[Sums, Tensor, tuple[Tensor, Tensor] | None]:
        """One optimizer step: the loss sums, the gradient's norm, and what `Tally.add` calls bad."""
        config = self.config
        index = self.order(number, config.batch_rows)
        batch, bad = self.data.batch(index, self.parts.target)
        size = config.micro_rows or config.batch_rows
        total: Sums | None = None
        for replay in range(config.objective.replays):
            shape = (config.batch_rows, config.data.row_tokens)
            uniform = draw(shape, config.seed, number, replay)
            uniform = uniform.to(self.parts.target.device)
            for start in range(0, config.batch_rows, size):
                part = slice(start, start + size)
                sums = self.step.sums(batch.part(part), uniform[part])
                sums.loss.backward()
                sums = dataclasses.replace(sums, loss=sums.loss.detach())
                total = sums if total is None else total + sums
        assert total is not None
        return total, self.optimizer.step(factor, total.weight), None if bad is None else (index, bad)

    def _expected_steps(self) -> int | None:
        progress = self.clock.progress(self.done)
        return self.clock.steps if self.clock.seconds is None else round(self.done / max(progress, 1e-9))

    def _report(self, since: Tally, norm: Tensor, factor: float) -> None:
        metrics = since.metrics()
        metrics["lr"] = self.config.optimizer.lr * factor
        metrics["grad_norm"] = round(float(norm), 4)
        if since.bad_rows:
            self.bad_rows += since.bad_rows
            self.say(f"rows {since.bad_rows} have non-finite hidden states and were skipped")
        if len(self.bad_rows) > self.config.data.max_bad_rows:
            raise DataError(
                f"{len(self.bad_rows)} rows had non-finite hidden states (row {self.bad_rows[0]} first)",
                where="train.data.max_bad_rows",
                next="check the target's weights and dtype",
            )
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            raise TrainerError(
                f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']} at step {self.done}",
                where="training",
                next="lower optimizer.lr, or start from the last checkpoint",
            )
        self.files.record(metrics)
        slots = " ".join(f"{value:.2f}" for value in metrics["slot_accuracy"])
        self.say(
            f"step {self.done} loss {metrics['loss']:.3f} slots {slots} lr {metrics['lr']:.2g} "
            f"{metrics['tokens_per_s']:,.0f} tokens/s {self.clock.progress(self.done):.0%}"
        )

    def _look(self) -> None:
        """Real decoding of a few prompts, in the middle of training."""
        assert self.evaluator is not None
        self.parts.drafter.eval()
        length = self.evaluator.measure_greedy(
            self.parts.drafter, self.config.evaluate.every_prompts, QUICK_TOKENS
        )
        self.parts.drafter.train()
        self.quick.append(length)
        self.files.record({"acceptance_length": round(length, 4)})
        self.say(
            f"step {self.done} acceptance length {length:.2f} (first {QUICK_TOKENS} tokens, few prompts)"
        )

    def save(self) -> None:
        """Write a checkpoint of the present step, unless it is there."""
        if self.saved_step == self.done:
            return
        self.files.enter("saving")
        facts: dict[str, Any] = {
            **self.parts.facts,
            "train": dataclasses.asdict(self.config),
            "data": self.data.identity,
            "parameters": self.optimizer.describe(),
        }
        folder = checkpoint.save(
            self.files.folder / "checkpoints",
            self.done,
            self.parts.drafter,
            self.optimizer,
            facts,
            self.config.checkpoint.keep,
        )
        self.saved_step = self.done
        self.say(f"saved {folder}")
