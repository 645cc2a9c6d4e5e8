"""Too little memory in a run: one message with what was asked for, who asked, and which keys take less.

Whose allocation failed is told from the traceback: in most layouts target, drafter, optimizer and evaluation
share a process, and each has keys of its own.
"""

from __future__ import annotations

import traceback

from trainer.errors import DoesNotFit, OutOfMemory
from trainer.failures import by_name
from trainer.sections import TrainConfig
from trainer.words import plural

ON_HOST = "can't allocate memory"  # of torch's CPU allocator, which has no exception of its own
ADVICE_OF_TORCH = ("If reserved but unallocated", "See documentation for Memory Management")
# Which part of the trainer was at work, by the keys that it obeys: the first that the traceback has.
EVALUATION = ("/trainer/evaluation/", "/trainer/run/looks.py")
UPDATE = ("/trainer/training/optim.py", "/trainer/training/adamw.py")
TARGET = (
    "/trainer/model/tapped_model.py",
    "/trainer/model/target.py",
    "/trainer/model/prefill.py",
    "/trainer/topology/handover.py",
)


def is_shortage(error: BaseException) -> bool:
    """Whether memory of a GPU or of the host was asked for that is not there."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"}:
        return True
    if not isinstance(error, RuntimeError):
        return False
    lines = str(error).splitlines()
    return any(ON_HOST in line or by_name()["cuda-oom"].finds(line) for line in lines)


def sizes(error: BaseException) -> str:
    """What the allocator says of sizes: its first line, without its own advice."""
    first = (str(error).strip().splitlines() or ["memory could not be allocated"])[0]
    for advice in ADVICE_OF_TORCH:
        first = first.partition(advice)[0].rstrip()
    return first[first.find(ON_HOST) :] if ON_HOST in first else first


def told(
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
        next=advice(error, config, phase, "target" in who),
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


def advice(error: BaseException, config: TrainConfig, phase: str, of_target: bool) -> str:
    """Which keys of the recipe make what was at work take less memory.

    Args:
        of_target: the error is that of a process or thread that has the target alone.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]

    def within(parts: tuple[str, ...]) -> bool:
        return any(part in file for file in files for part in parts)

    data, evaluate, objective = config.data, config.evaluate, config.objective
    if phase == "loading":
        return (
            "topology: split gives the target GPUs of its own; a smaller drafter (train.drafter.layers, "
            "intermediate_size), or train.target.dtype: bfloat16, takes less"
        )
    if phase == "data":
        if ON_HOST in str(error) or isinstance(error, MemoryError):
            return f"lower train.data.rows (now {data.rows:,}): the host keeps all rows' hidden states"
        if data.continuations:
            return f"lower train.data.batch (now {data.batch:,})"
        return _target_takes_less(config)
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
    shared = config.topology == "colocated" and config.layout.ranks != 1
    if within(UPDATE) and shared and config.layout.shard_optimizer != "on":
        return f"say train.layout.shard_optimizer: on, or {keys}"
    return keys


def _rows_of_one(config: TrainConfig) -> int:
    """Rows of a step that one of those who share it has."""
    layout = config.layout
    parts = (layout.ranks or 1) if config.topology == "colocated" else layout.drafters
    return -(-config.batch_rows // parts)


def _target_takes_less(config: TrainConfig) -> str:
    rows = config.batch_rows if config.topology == "threads" else _rows_of_one(config)
    at_once = f"the target reads {plural(rows, 'row')} at once"
    least = f"lower train.token_budget (now {config.token_budget:,}: {at_once})"
    if config.topology == "threads":
        return f"{least} or train.layout.queue (now {config.layout.queue})"
    return least
