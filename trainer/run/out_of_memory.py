"""Too little memory in a run: one message with what was asked for, who asked, and which keys take less.

Whose allocation failed is told from the traceback: in most layouts target, drafter, optimizer and evaluation
share a process, and each has keys of its own.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import DoesNotFit, OutOfMemory
from trainer.process.runfiles import RunFiles
from trainer.sections import TrainConfig
from trainer.shortage import is_shortage, of_the_host, sizes
from trainer.topology.ranks import Ranks
from trainer.training.optim import unshareable
from trainer.words import plural

# Files of the parts of the trainer that have keys of their own: one of them in the traceback was at work.
EVALUATION = ("/trainer/evaluation/", "/trainer/run/looks.py")
UPDATE = ("/trainer/training/optim.py", "/trainer/training/adamw.py")
TARGET = (
    "/trainer/model/tapped_model.py",
    "/trainer/model/target.py",
    "/trainer/model/prefill.py",
    "/trainer/topology/handover.py",
)


@contextmanager
def told_with_keys(config: TrainConfig, files: RunFiles, ranks: Ranks | None) -> Iterator[None]:
    """Too little memory inside becomes one message. Raises OutOfMemory."""
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        rank = None if ranks is None else ranks.rank
        short = message(error, config, files.pace.phase, files.step, rank)
        raise short.with_traceback(error.__traceback__) from error  # the root cause names the allocation


def message(
    error: BaseException, config: TrainConfig, phase: str, step: int | None, rank: int | None
) -> OutOfMemory:
    """The message for an error that `is_shortage`.

    Args:
        phase, step: where the run was.
        rank: whose error it is, in a run of several processes.
    """
    at = f", step {step}" if step is not None else ""
    kind = DoesNotFit if phase == "compiling" else OutOfMemory
    who = _who(error, config, rank)
    return kind(
        f"out of memory: {sizes(error)}",
        where=f"{who}{phase}{at}",
        next=_advice(error, config, phase, "target" in who),
    )


def _who(error: BaseException, config: TrainConfig, rank: int | None) -> str:
    """ "thread drafter-1, ", "rank 3 (target), ", or nothing of the one that there is."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in thread ")]
    if notes:
        return f"{notes[0].removeprefix('in ')}, "
    if rank is None:
        return ""
    role = ""
    if config.topology == "split":
        role = " (drafter)" if rank < config.layout.drafters else " (target)"
    return f"rank {rank}{role}, "


def _advice(error: BaseException, config: TrainConfig, phase: str, of_target: bool) -> str:
    """Which keys of the recipe make what was at work take less memory.

    Args:
        of_target: the error is that of a process or thread that has the target alone.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]

    def within(parts: tuple[str, ...]) -> bool:
        return any(part in file for file in files for part in parts)

    evaluate, objective = config.evaluate, config.objective
    if phase == "loading":
        apart = "topology: split gives the target GPUs of its own; " if config.topology == "colocated" else ""
        narrow = ", or train.target.dtype: bfloat16," if config.target.dtype != "bfloat16" else ""
        return f"{apart}a smaller drafter (train.drafter.layers, intermediate_size){narrow} takes less"
    if phase == "data":
        return _data_takes_less(config, of_the_host(error))
    if phase == "evaluating" or within(EVALUATION):
        prompts = evaluate.prompts if phase == "evaluating" else min(evaluate.every_prompts, evaluate.prompts)
        key = "prompts" if phase == "evaluating" else "every_prompts"
        wide = " or say train.evaluate.dtype: target," if evaluate.dtype == "float32" else ""
        return f"lower train.evaluate.{key} (now {prompts}),{wide} or lower train.evaluate.new_tokens"
    if phase == "saving":
        return "a checkpoint is written from a copy in the host's memory: give the container more"
    if of_target or within(TARGET):
        return _target_takes_less(config)
    micro = config.micro_rows or _rows_of_one(config)
    width = objective.anchors_per_pass or "all of a row's"
    keys = (
        f"lower train.micro_rows (now {micro}) or train.objective.anchors_per_pass (now {width}): "
        "the step stays what it is"
    )
    shareable = (
        config.topology == "colocated" and config.layout.ranks != 1 and not unshareable(config.optimizer)
    )
    if within(UPDATE) and shareable and config.layout.shard_optimizer != "on":
        return f"say train.layout.shard_optimizer: on, or {keys}"
    return keys


def _rows_of_one(config: TrainConfig) -> int:
    """Rows of a step that one of those who share it has."""
    layout = config.layout
    parts = (layout.ranks or 1) if config.topology == "colocated" else layout.drafters
    return -(-config.batch_rows // parts)


def _data_takes_less(config: TrainConfig, on_host: bool) -> str:
    data = config.data
    if on_host and data.source == "store":
        return "a store's documents are laid out in rows in the host's memory: give the container more"
    if on_host:
        kept = "hidden states" if data.continuations or data.states == "cached" else "tokens"
        return f"lower train.data.rows (now {data.rows:,}): the host keeps all rows' {kept}"
    if data.continuations:
        return f"lower train.data.batch (now {data.batch:,})"
    return _target_takes_less(config)


def _target_takes_less(config: TrainConfig) -> str:
    rows = config.batch_rows if config.topology == "threads" else _rows_of_one(config)
    at_once = f"the target reads {plural(rows, 'row')} at once"
    least = f"lower train.token_budget (now {config.token_budget:,}: {at_once})"
    if config.topology == "threads":
        return f"{least} or train.layout.queue (now {config.layout.queue})"
    return least
