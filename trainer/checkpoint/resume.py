"""Going on from a checkpoint: which one, whether it belongs to this recipe and data, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint import files as checkpoint
from trainer.checkpoint.files import step_of
from trainer.checkpoint.identity import ABSENT, completed, differences
from trainer.errors import ConfigError
from trainer.sections import Target, TrainConfig

# What may differ from the run that wrote a checkpoint: where and how it runs and what it reports, not what it
# learns.
FREE = (
    "data.store",  # a folder's name, as train.data.store: what is in it is known by its inputs and settings
    "target.path",  # it is known by its digest, and may have moved
    "train.attention",
    "train.checkpoint",
    "train.data.budget_s",
    "train.data.max_bad_rows",
    "train.data.store",
    "train.device",
    "train.evaluate",
    "train.execution",
    "train.layout",
    "train.logging",
    "train.micro_rows",
    "train.objective.anchors_per_pass",
    "train.objective.loss_chunk",
    "train.optimizer.max_bad_steps",
    "train.policy",
    "train.precision",
    "train.report_every_s",
    "train.target.attention",
    "train.target.compile",
    "train.target.path",
    "train.threads",
    "train.topology",
)
SHOWN = 6  # parameters that do not fit


@dataclass
class Progress:
    """Where training stands besides weights, moments and generators."""

    step: int = 0
    elapsed_s: float = 0.0  # of training, over all lives of the run
    bad_rows: list[int] = field(default_factory=list)
    # (step, prefix-match or None, by real decoding): what was measured on the way
    measured: list[tuple[int, float | None, float]] = field(default_factory=list)
    # steps with a non-finite gradient: all of them, and those in a row up to now
    bad_steps: tuple[int, int] = (0, 0)
    matched: int = 0  # the latest step after which prefix-match was measured

    @property
    def best(self) -> float:
        """The highest acceptance length by real decoding so far; 0 before the first."""
        return max((real for _, _, real in self.measured), default=0.0)

    def to_json(self, batch_rows: int, rows: int, warmup: int) -> dict[str, Any]:
        """As of now, for a thread to write; with the position in the data, which follows from the step: the
        order of rows is a function of seed and step.
        """
        seen = self.step * batch_rows
        return {
            "schedule": {"step": self.step, "elapsed_s": self.elapsed_s, "warmup_steps": warmup},
            "position": {"rows": seen, "epoch": seen // rows, "row_of_epoch": seen % rows},
            "bad_rows": [*self.bad_rows],
            "measured": [*self.measured],
            "bad_steps": {"total": self.bad_steps[0], "in_a_row": self.bad_steps[1]},
            "matched": self.matched,
        }

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Progress:
        """Of trainer.json; one that knows no bad steps, or no matches, is from before they were saved."""
        return cls(
            facts["schedule"]["step"],
            facts["schedule"]["elapsed_s"],
            list(facts["bad_rows"]),
            [(step, prefix, real) for step, prefix, real in facts["measured"]],
            (facts["bad_steps"]["total"], facts["bad_steps"]["in_a_row"]) if "bad_steps" in facts else (0, 0),
            facts.get("matched", facts["schedule"]["step"]),
        )


def choose(place: Path, say: Callable[[str], None], beat: Callable[[], None] = lambda: None) -> Path:
    """The checkpoint to go on from: `place` itself, or the newest sound one of a run's folder.

    Raises:
        ConfigError: there is none; or `place` is one and damaged (the newest sound one before it is named).
    """
    if checkpoint.FOLDER.fullmatch(place.resolve().name):
        return _this_one(place.resolve(), beat)
    root = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    all_of_them = checkpoint.listed(root)
    sound, damages = _newest_sound(all_of_them, beat)
    for damage in damages:
        say(f"WARNING: a checkpoint is damaged and passed over: {damage.where}: {damage.what}")
    if sound is None:
        raise ConfigError(
            f"all of its {len(damages)} checkpoints are damaged" if damages else "no checkpoint there",
            where=str(root),
            next="name a run's folder, or one of its checkpoints/step-* folders",
        )
    if damages:
        say(f"WARNING: going back to {sound.name}, the newest sound one")
    return sound


def _this_one(folder: Path, beat: Callable[[], None]) -> Path:
    try:
        checkpoint.verify(folder, beat)
    except checkpoint.Damaged as damage:
        older = [each for each in checkpoint.listed(folder.parent) if step_of(each) < step_of(folder)]
        sound, _ = _newest_sound(older, beat)
        hint = f"resume from {sound}" if sound else "none before it is sound"
        raise ConfigError(damage.what, where=damage.where, next=hint) from None
    return folder


def _newest_sound(
    folders: list[Path], beat: Callable[[], None]
) -> tuple[Path | None, list[checkpoint.Damaged]]:
    """The first of `folders` that is as it was written, and what is wrong with those before it."""
    damages: list[checkpoint.Damaged] = []
    for folder in folders:
        try:
            checkpoint.verify(folder, beat)
        except checkpoint.Damaged as damage:
            damages.append(damage)
        else:
            return folder, damages
    return None, damages


def check_same(
    folder: Path,
    saved: dict[str, Any],
    present: dict[str, Any],
    allow_changes: bool,
    say: Callable[[str], None],
) -> None:
    """Hold what is present of recipe, target and data to the checkpoint's; other code is said and allowed.

    Args:
        saved: trainer.json of the checkpoint.
        present: some of "train", "target", "data", "code".
    Raises:
        ConfigError: they differ, with every key that does; unless changes are allowed, then they are said.
    """
    for line in differences(saved["code"], present.get("code", saved["code"])):
        say(f"WARNING: other code than the checkpoint's: {line}")
    keys = sorted({*present} - {"code"})
    there = {key: saved[key] for key in keys}
    if "train" in there:  # what its code did before a key was thought of is that key's default
        there["train"] = completed(there["train"], asdict(TrainConfig(Target(""))))
    found = differences(there, {key: present[key] for key in keys}, FREE)
    if found and not allow_changes:
        raise ConfigError(
            "this checkpoint is of another recipe or data:\n" + "\n".join(f"  {line}" for line in found),
            where=str(folder),
            next="resume with the recipe and data that it was made of, or say --allow-changes",
        )
    for line in found:
        say(f"WARNING: other than in the checkpoint: {line}")


def check_parameters(folder: Path, saved: dict[str, Any], present: Sequence[Mapping[str, Any]]) -> None:
    """Hold the parameters that are trained to the checkpoint's: weights and moments fit no others, whatever
    changes are allowed.

    Args:
        saved: trainer.json of the checkpoint.
        present: as `DrafterOptimizer.describe` gives them.
    Raises:
        ConfigError: a parameter is there or here alone, has another shape or another algorithm.
    """
    there, here = (
        {each["parameter"]: {key: each[key] for key in ("shape", "algorithm")} for each in described}
        for described in (saved["parameters"], present)
    )
    found = [
        f"{name}: {_of(there.get(name))} there, {_of(here.get(name))} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]
    if found:
        more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise ConfigError(
            "its weights and moments are those of other parameters:\n"
            + "\n".join(f"  {line}" for line in [*found[:SHOWN], *more]),
            where=str(folder),
            next="resume with its drafter section and optimizer groups; for another optimizer, begin a new "
            f"run with train.drafter.init: drafter and init_from: {folder}",
        )


def _of(parameter: dict[str, Any] | None) -> str:
    return f"{parameter['shape']} by {parameter['algorithm']}" if parameter else ABSENT


def make_room(root: Path, chosen: Path, say: Callable[[str], None]) -> None:
    """Before a run goes on in its own folder: what is newer than `chosen` must be damaged, and is put aside.

    Raises:
        ConfigError: a newer one is sound, or `root` has those of another run; going on from an older one, or
            beside them, would mix two lines of training.
    """
    if chosen.parent.resolve() != root.resolve():
        if checkpoint.listed(root):  # later steps of theirs would be taken for newer than all that is saved
            raise ConfigError(
                f"this folder has checkpoints of another run than {chosen}",
                where=str(root),
                next=f"go on with --resume {root.parent}, or name another folder in DFLASH_RUN_DIR",
            )
        return
    for newer in [each for each in checkpoint.listed(root) if step_of(each) > step_of(chosen)]:
        try:
            checkpoint.verify(newer)
        except checkpoint.Damaged:
            aside = root / f"damaged-{newer.name}"
            if aside.exists():
                say(f"{aside} is there already; {newer.name} will be overwritten")
                continue
            newer.rename(aside)
            say(f"WARNING: {newer.name} is now called {aside.name}")
            continue
        raise ConfigError(
            f"{newer.name} is newer than {chosen.name}, and sound",
            where=str(root),
            next="resume from the newest, or in another folder (DFLASH_RUN_DIR)",
        )
