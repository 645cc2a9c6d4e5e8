"""Which checkpoint a run goes on from, if any, and what a run's own checkpoints tell of how it came about."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainer.checkpoint import files as checkpoint
from trainer.checkpoint import identity, resume
from trainer.data.dataset import Dataset
from trainer.data.packing import Rows
from trainer.errors import ConfigError
from trainer.process.runfiles import RunFiles
from trainer.run.setup import Assembled, Say
from trainer.sections import TrainConfig
from trainer.training.optim import DrafterOptimizer


def choose(
    config: TrainConfig, files: RunFiles, say: Say, resume_from: Path | None, allow_changes: bool
) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to go on from, if any, and its trainer.json. The recipe is held to it at once.

    Raises:
        ConfigError: none is sound; or it is of another version or recipe; or this is a new run in a folder
            that has some.
    """
    root = files.folder / "checkpoints"
    if resume_from is None:
        if checkpoint.listed(root):
            raise ConfigError(
                "this folder has checkpoints of an earlier run",
                where=str(root),
                next=f"go on with --resume {files.folder}, or name another folder in DFLASH_RUN_DIR",
            )
        return None, {}
    chosen = resume.choose(resume_from, say, files.beat)
    saved = checkpoint.read_facts(chosen)
    known = {"train": dataclasses.asdict(config), "code": identity.code()}
    resume.check_same(chosen, saved, known, allow_changes, say)
    resume.make_room(root, chosen, say)
    files.forget_failure()
    say(f"going on from {chosen}")
    files.note(f"resumed from {chosen}")
    return chosen, saved


def data_again(config: TrainConfig, saved: dict[str, Any]) -> TrainConfig:
    """How to make the rows of a checkpoint: as many as there were, however long they take now."""
    rows = saved.get("data", {}).get("rows")
    if rows is None or not config.data.continuations:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, rows=rows, budget_s=None))


def facts_of(
    config: TrainConfig, parts: Assembled, data: Dataset, optimizer: DrafterOptimizer
) -> dict[str, Any]:
    """Who this run is, for its checkpoints."""
    return {
        "train": dataclasses.asdict(config),
        "target": {**parts.facts["target"], "sha256": identity.target_digest(parts.target_path)},
        "data": _data_facts(data),
        "code": identity.code(),
        "parameters": optimizer.describe(),
    }


def _data_facts(data: Dataset) -> dict[str, Any]:
    """The data's own account; rows that were made for this run are known by their content."""
    if isinstance(data.rows, Rows):
        return {**data.identity, "rows_sha256": identity.rows_digest(data.rows)}
    return data.identity
