"""A drafter from a folder in the published format, be it a checkpoint of training or not."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from trainer.checkpoint.files import DRAFTER_FILES, TRAINING_FILES, Damaged, verify
from trainer.errors import ConfigError
from trainer.model.drafter import Drafter
from trainer.model.drafter_config import read_drafter_config
from trainer.shortage import is_shortage


def load_drafter(folder: Path) -> Drafter:
    """The drafter in `folder`, in float32; that of a checkpoint of training is held to its checksums.

    Raises:
        ConfigError: a checkpoint that is damaged or was not written to its end; missing, unknown, wrongly
            shaped or broken weights, by name: a loader that skips them would give a drafter that runs and
            foretells nothing.
    """
    drafter = Drafter(read_drafter_config(folder))
    path = folder / "model.safetensors"
    try:
        state = load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        if is_shortage(error):
            raise
        _hold_to_checksums(folder)  # of a copy that broke off it says more
        raise ConfigError(f"cannot read the weights: {error}", where=str(path)) from None
    wanted = drafter.state_dict()
    for name, problem in (
        *((name, "is missing") for name in sorted(set(wanted) - set(state))),
        *((name, "is not a drafter's") for name in sorted(set(state) - set(wanted))),
        *(
            (name, f"has shape {tuple(state[name].shape)}, not {tuple(wanted[name].shape)}")
            for name in sorted(set(state) & set(wanted))
            if state[name].shape != wanted[name].shape
        ),
        *((name, "is not finite") for name in sorted(state) if not bool(state[name].isfinite().all())),
    ):
        raise ConfigError(f"weight {name} {problem}", where=str(path))
    _hold_to_checksums(folder)
    drafter.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return drafter


def _hold_to_checksums(folder: Path) -> None:
    """Raises ConfigError: a checkpoint of training whose drafter is not what was written."""
    if any((folder / name).exists() for name in TRAINING_FILES):
        try:
            verify(folder, only=DRAFTER_FILES)
        except Damaged as damage:
            raise ConfigError(damage.what, where=damage.where, next="take another checkpoint") from None
