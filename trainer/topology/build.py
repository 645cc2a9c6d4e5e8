"""From a recipe's topology to the work that a step is."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trainer.data.dataset import Dataset
from trainer.model.target import Target
from trainer.process.runfiles import RunFiles
from trainer.sections import TrainConfig
from trainer.topology.colocated import Colocated
from trainer.topology.ranks import Ranks
from trainer.topology.split import SplitDrafter
from trainer.topology.threads import Threads
from trainer.topology.work import Work
from trainer.training.optim import DrafterOptimizer
from trainer.training.step import DrafterStep

Say = Callable[[str], None]


def make_work(
    config: TrainConfig,
    files: RunFiles,
    say: Say,
    target: Target,
    data: Dataset,
    order: Callable[[int, int], Tensor],
    step: DrafterStep,
    first: int,
    ranks: Ranks | None = None,
    optimizer: DrafterOptimizer | None = None,
) -> Work:
    """Whoever does the passes, started.

    Args:
        order: (step, batch rows) -> the batch's rows.
        step: the drafter's, on the target's device.
        first: the first step of this life of the run.
        ranks: of a run of several processes; in topology split, of the drafters alone.
        optimizer: whose state may be shared out over the ranks.
    Raises:
        ConfigError: the topology cannot work here.
    """
    if config.topology == "threads":
        return Threads(config, files, say, target, step.drafter, data, order, step.width, first)
    if config.topology == "split":
        assert ranks is not None
        return SplitDrafter(config, files, say, step, target, data, order, ranks, first)
    shared = optimizer if optimizer is not None and optimizer.share is not None else None
    return Colocated(config, step, target, data, order, ranks, shared)
