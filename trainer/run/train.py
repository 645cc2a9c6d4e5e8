"""A training run from beginning to end: load, make rows, measure, check, train, measure again, save.

All phases keep to the run's time budget, so a slow machine trains less instead of running late.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from trainer.checkpoint import files as checkpoint
from trainer.checkpoint import resume
from trainer.data import dataset as datasets
from trainer.data.dataset import Dataset
from trainer.data.prompts import draw_prompts
from trainer.errors import DataError, Stopped
from trainer.evaluation.evaluator import Evaluator, Measurement
from trainer.evaluation.report import Report, make_report
from trainer.machine import choose_device
from trainer.model.random_target import RANDOM, WORTHLESS
from trainer.process.runfiles import RunFiles
from trainer.process.trackers import Trackers
from trainer.run.console import Console, Plain
from trainer.run.loading import loading_deadline_s
from trainer.run.looks import same_looks
from trainer.run.loop import AFTER_SHARE, SAVE_RESERVE_S, Trainer
from trainer.run.origin import choose, data_again, facts_of
from trainer.run.out_of_memory import told_with_keys
from trainer.run.rehearsal import check_target
from trainer.run.scatter import scatter
from trainer.run.setup import Assembled, Say, assemble
from trainer.sections import Logging, TrainConfig
from trainer.topology.planning import against_plan
from trainer.topology.ranks import Ranks
from trainer.topology.sharing import share_of
from trainer.topology.split import serve
from trainer.topology.start import gpu_of, part_of, with_its_cores
from trainer.topology.together import first_then_others, same_data
from trainer.training.optim import DrafterOptimizer
from trainer.words import plural
from trainer.writing import write_json

BEFORE_SHARE = 0.05  # of the whole run's time: the most that measuring the untrained drafter may take


def run(
    config: TrainConfig,
    files: RunFiles,
    say: Say,
    console: Console | None = None,
    resume_from: Path | None = None,
    allow_changes: bool = False,
    ranks: Ranks | None = None,
) -> Report | None:
    """Train as configured. Returns the report, None when the recipe evaluates nothing.

    Args:
        console: where progress is shown; lines through `say` when not given.
        resume_from: a run's folder or one of its checkpoints to go on from.
        allow_changes: go on although recipe or data differ from the checkpoint's.
        ranks: this process's place, if the run has several; the first one measures, saves and reports.
    Raises:
        TrainerError: with what to do; Stopped after saving, when a signal came.
    """
    with told_with_keys(config, files, ranks):
        return _run(config, files, say, console, resume_from, allow_changes, ranks)


def _run(
    config: TrainConfig,
    files: RunFiles,
    say: Say,
    console: Console | None,
    resume_from: Path | None,
    allow_changes: bool,
    ranks: Ranks | None,
) -> Report | None:
    files.pace.loading_s = loading_deadline_s(config)
    files.enter("loading")
    console = console or Plain(say)
    first = ranks is None or ranks.first
    if ranks is not None:
        on_gpu = choose_device(config.device, "train.device").type == "cuda"
        ranks.join(gpu_of(ranks.rank, config) if on_gpu else None, config.layout.wait_s)
        config = with_its_cores(config, ranks.size)
    chosen, saved = first_then_others(
        ranks, lambda: choose(config, files, say, resume_from, allow_changes), "a checkpoint to be chosen"
    )
    parts = assemble(config, say, part_of(ranks.rank if ranks else None, config))
    trained = sum(parameter.numel() for parameter in parts.drafter.parameters())
    share, why = share_of(config, trained, parts.target.device, ranks)
    if ranks is not None and first:
        say(f"optimizer: {'a share' if share else 'all of it'} on every rank: {why}")
    optimizer = DrafterOptimizer(parts.drafter, config.optimizer, share)
    if chosen is not None:
        resume.check_parameters(chosen, saved, optimizer.describe())
    if first:
        _say_groups(optimizer, files, say)
    files.enter("data")
    again = data_again(config, saved)
    data = same_data(
        ranks,
        lambda: datasets.build(again, parts.target, parts.tokenizer, say, files.beat),
        files.folder,
    )
    _say_data(data, say)
    if not data.has_anchors():
        raise DataError(
            "no block can start anywhere: that takes two trained-on tokens in a row, with one before them",
            where="train.data",
            next="look at what is trained on (python -m trainer data show STORE --row 0), or at row_tokens",
        )
    if config.target.weights == RANDOM:
        files.note(WORTHLESS)
    facts = facts_of(config, parts, data, optimizer)
    if chosen is not None:
        known = {key: facts[key] for key in ("target", "data")}
        resume.check_same(chosen, saved, known, allow_changes, say)
    if ranks is not None and config.topology == "split":
        drafters = ranks.first_ones(config.layout.drafters)
        if drafters is None:
            _serve(config, files, parts, data, ranks, saved)
            return None
        ranks = drafters
    evaluator, before = _measure_before(config, parts, files, say) if first else (None, None)
    trackers = Trackers(config.logging if first else Logging(trackers=[]), files.folder, facts["train"], say)
    trainer = Trainer(config, files, console, parts, data, optimizer, evaluator, facts, trackers, ranks)
    try:
        with told_with_keys(config, files, ranks):
            _train(trainer, chosen, saved)
    except Stopped:
        raise
    except Exception as error:
        files.fail(error)  # now: what follows waits for a disk and for other programs
        raise
    finally:
        console.close()
        trainer.close()
        trackers.close()
    if ranks is not None:
        ranks.leave()
    _show_measured(trainer, say)
    if evaluator is None:
        files.enter("done")
        return None
    files.enter("evaluating")
    parts.drafter.eval()
    total = config.budget.total_s
    limit = None if total is None else max(AFTER_SHARE / 2 * total, total - files.elapsed_s - SAVE_RESERVE_S)
    say(f"decoding {plural(config.evaluate.prompts, 'held-out prompt')}: what was trained, and prompt lookup")
    after = evaluator.measure(parts.drafter, limit_s=limit)
    random = config.target.weights == RANDOM
    report = make_report(config.evaluate, before, after, evaluator.lookup(), evaluator.repetition, random)
    best = max(after.greedy.acceptance_length, trainer.progress.best)
    files.record({"acceptance_length": round(after.greedy.acceptance_length, 4)})
    files.summarise(
        report.headline, report.columns, report.rows, report.notes, report.lossless, round(best, 4)
    )
    files.enter("done")
    return report


def _serve(
    config: TrainConfig,
    files: RunFiles,
    parts: Assembled,
    data: Dataset,
    ranks: Ranks,
    saved: dict[str, Any],
) -> None:
    """Be a target of the topology split, until its drafters end."""
    begin = resume.Progress.from_json(saved).step if saved else 0
    files.enter("compiling")
    check_target(config, parts.target, data, data.order(config.seed))
    files.enter("training")
    mine = ranks.rank - config.layout.drafters
    serve(config, files, parts.target, data, data.order(config.seed), mine, begin)
    ranks.leave()
    files.enter("done")


def _say_groups(optimizer: DrafterOptimizer, files: RunFiles, say: Say) -> None:
    described = optimizer.describe()
    for group in optimizer.section.groups:
        mine = [each for each in described if each["group"] == group.name]
        names = sorted({str(each["parameter"]).split(".")[-2] for each in mine})
        rate = f"learning rate {optimizer.section.lr * group.lr_scale:g}, weight decay {group.weight_decay:g}"
        say(f"{group.name}: {group.algorithm}, {rate}, {plural(len(mine), 'parameter')} ({', '.join(names)})")
    write_json(files.folder / "parameters.json", {"parameters": described})


def _say_data(data: Dataset, say: Say) -> None:
    say(data.describe())
    if data.bad_rows:
        say(f"data: rows {data.bad_rows} have non-finite hidden states and are skipped")


def _measure_before(
    config: TrainConfig, parts: Assembled, files: RunFiles, say: Say
) -> tuple[Evaluator | None, Measurement | None]:
    """The evaluator, and what the drafter is worth before training; also for a run that goes on from a
    checkpoint, so that its report says the same.
    """
    section = config.evaluate
    if not section.prompts:
        return None, None
    files.enter("evaluating")
    prompts = draw_prompts(parts.tokenizer, section.prompts, section.prompt_tokens, True, config.seed)
    parts.drafter.eval()
    say(f"decoding {plural(len(prompts), 'held-out prompt')}: the target alone, and the drafter as it begins")
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


def _train(trainer: Trainer, chosen: Path | None, saved: dict[str, Any]) -> None:
    """Check, train, save. Raises Stopped after saving, when a signal came, TrainerError."""
    files = trainer.files
    files.enter("compiling")
    trainer.prepare()
    progress = resume.Progress()
    if chosen is not None:
        progress = resume.Progress.from_json(saved)
        checkpoint.restore(chosen, trainer.optimizer)
        if progress.measured and not same_looks(saved["train"]["evaluate"], trainer.config.evaluate):
            progress.measured.clear()
            trainer.say("WARNING: looks are others than before, so lengths do not compare: best counts anew")
    files.enter("training")
    started = time.monotonic()
    trainer.start(progress, _seconds(trainer, progress, files.elapsed_s))
    try:
        trainer.train()
        trainer.save()
    except Stopped:
        failed = files.failed_peer()
        if failed is not None:
            trainer.say(f"nothing is saved: another process of this run has failed ({failed})")
            raise
        trainer.save()
        trainer.say(f"stopped and saved; go on with --resume {files.folder}")
        raise
    trained = trainer.progress.step - trainer.first_step
    took = time.monotonic() - started
    trainer.say(f"{plural(trained, 'step')} in {took:.1f} s")
    planned = against_plan(files.folder, trained * trainer.config.batch_tokens / max(took, 1e-9))
    if planned is not None:
        trainer.say(planned)
        files.note(planned)
    # Nothing was measured on the way, or the best one has been removed.
    if trainer.saves and not (trainer.writer.root / checkpoint.BEST).exists():
        trainer.saver.mark_best(trainer.progress.step)


def _seconds(trainer: Trainer, progress: resume.Progress, elapsed_s: float) -> float | None:
    """Time for training from now on: what its own budget leaves, or less when the whole run's does."""
    budget = trainer.config.budget
    left = None if budget.train_s is None else budget.train_s - progress.elapsed_s
    if budget.total_s is None:
        return left
    reserve = 0.0
    if trainer.evaluator:
        # More prompts than before training, but fewer passes: each accepts more tokens.
        reserve = min(1.5 * trainer.evaluator.last_s, AFTER_SHARE * budget.total_s)
    rest = max(1.0, budget.total_s - elapsed_s - reserve - SAVE_RESERVE_S)
    return rest if left is None else min(rest, left)


def _show_measured(trainer: Trainer, say: Say) -> None:
    """What was measured on the way, prefix-match against real decoding, to look at: acceptance.txt."""
    points = [(prefix, real) for _, prefix, real in trainer.progress.measured if prefix is not None]
    if len(points) < 2:
        return
    text = scatter(points, "prefix-match", "real decoding")
    for line in text.splitlines():
        say(line)
    trainer.files.write_text("acceptance.txt", text + "\n")
