"""How many processes a recipe wants here, and the beginning and end of one of them."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NoReturn

from trainer.errors import ConfigError
from trainer.machine import usable_cores
from trainer.sections import TrainConfig
from trainer.topology.rank import LAUNCHER, WatchedFiles, die_with_launcher
from trainer.writing import to_log

Part = Literal["all", "ends", "target"]
"""What a process has: target and drafter; the drafter and the target's two ends; the target alone, while the
drafter is in the host's memory for its names and shapes.
"""


def wanted_ranks(config: TrainConfig) -> int:
    """Processes of the run: one for threads, targets and drafters for split; for colocated one a GPU, or as
    many as the recipe says.

    Raises:
        ConfigError: fewer GPUs than ranks.
    """
    layout = config.layout
    if config.topology == "threads" or (config.topology == "colocated" and layout.ranks == 1):
        return 1
    if config.topology == "colocated" and layout.ranks is None and one_gpu_at_most(os.environ):
        return 1  # without the seconds that importing torch takes
    split = layout.targets + layout.drafters if config.topology == "split" else None
    if config.device == "cpu":
        return split or layout.ranks or 1
    import torch

    gpus = torch.cuda.device_count()
    ranks = split or layout.ranks or max(1, min(gpus, config.batch_rows))
    if gpus and ranks > gpus:
        raise ConfigError(
            f"{ranks} processes need a GPU each; torch sees {gpus}",
            where="train.layout",
            next="launch with more GPUs (launch.gpus), or use fewer",
        )
    return ranks


def one_gpu_at_most(environment: Mapping[str, str]) -> bool:
    """By what the launch has chosen for this process; False: torch must be asked."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and "," not in visible


def gpu_of(rank: int, config: TrainConfig) -> int:
    """A rank's GPU. In topology split drafters are the first ranks, and targets have the first GPUs."""
    layout = config.layout
    if config.topology != "split":
        return rank
    return layout.targets + rank if rank < layout.drafters else rank - layout.drafters


def part_of(rank: int | None, config: TrainConfig) -> Part:
    """What a process of the run loads. In topology split a drafter gets its hidden states from the targets:
    it needs a target's layers only where it measures, or makes the data with them, which the first one does.
    """
    if rank is None or config.topology != "split":
        return "all"
    if rank >= config.layout.drafters:
        return "target"
    data = config.data
    reads = data.source == "stdlib" and (data.continuations or data.states == "cached")
    return "all" if rank == 0 and (config.evaluate.prompts or reads) else "ends"


def launch(run: Path, ranks: int, arguments: Sequence[str]) -> NoReturn:
    """Run `trainer rank ARGUMENTS` in every rank, or `trainer alone ARGUMENTS` in one process, and end with
    the run's exit code.
    """
    from trainer.topology.launcher import Launcher

    os.environ["DFLASH_RUN_DIR"] = str(run.resolve())
    os.environ[LAUNCHER] = str(os.getpid())
    _end(Launcher(run, ranks)(["-m", "trainer", "alone" if ranks == 1 else "rank", *arguments]))


def as_watched(files: WatchedFiles, work: Callable[[], int]) -> NoReturn:
    """Be a process of the run, from first to last.

    Args:
        work: the whole run, its exit code.
    """
    die_with_launcher()
    files.listen()
    files.enter("loading")
    try:
        code = work()
    except BaseException as error:  # what it could not tell in its own way
        files.fail(error)
        to_log(traceback.format_exc())
        code = 1
    files.leave()
    _end(code)


def _end(code: int) -> NoReturn:
    """Not through the interpreter's end: what is left of a failed group may wait there for its peers, and
    tearing torch down takes seconds on a busy machine.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def with_its_cores(config: TrainConfig, ranks: int) -> TrainConfig:
    """The ranks share the cores, unless the recipe says how many threads each has."""
    if config.threads is not None:
        return config
    return dataclasses.replace(config, threads=max(1, usable_cores() // ranks))
