"""The folders that `export` and `import` are given, checked by their small files and headers.

No torch in here: the command line asks this first, so what cannot work is refused before seconds go by.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.export.hf import read_hf
from trainer.export.speculators import read_speculators, target_name
from trainer.model.drafter_config import DrafterConfig, read_drafter_config
from trainer.model.folder import CONFIG, WEIGHTS, header, read_json, refuse_existing, weight_files
from trainer.model.pair import check_pair, dimension
from trainer.model.target_files import read_config


@dataclass(frozen=True)
class Given:
    """A drafter's shape, and its target's config.json and folder where they are known."""

    config: DrafterConfig
    target: Path | None
    raw: dict[str, Any] | None
    foreign: bool = False  # in the layout of speculators


def for_export(checkpoint: Path, out: Path, format: str, target: Path | None) -> Given:
    """What `export` is given. Raises ConfigError as `trainer.export.commands.export` says."""
    refuse_existing(out)
    config = read_drafter_config(checkpoint)
    if config.target.weights is not None:
        raise ConfigError(
            f"this drafter was trained on {config.target}: it foretells nothing, and is not for serving",
            where=str(checkpoint),
            next="train with target.weights: file",
        )
    raw = None
    if target is not None:
        raw = read_config(target)
        check_pair(config, raw, str(checkpoint), str(target))
    elif format == "speculators":
        raise ConfigError(
            "the speculators layout names the target and carries its embedding and head",
            where=str(out),
            next="name the target's folder with --target",
        )
    header(checkpoint / WEIGHTS)
    return Given(config, target, raw)


def for_import(source: Path, out: Path, target: Path | None) -> Given:
    """What `import` is given; without a target, the one that the drafter names, if it is here.

    Raises:
        ConfigError: as `trainer.export.commands.import_drafter` says.
    """
    refuse_existing(out)
    where = str(source / CONFIG)
    data = read_json(source / CONFIG, "no drafter there", "name a folder with config.json and safetensors")
    foreign = "speculators_model_type" in data
    if target is None and foreign:
        named = target_name(data)
        target = Path(named) if named and (Path(named) / CONFIG).is_file() else None
    raw = read_config(target) if target is not None else None
    layers = None if raw is None else dimension(raw, "num_hidden_layers")
    config = (read_speculators if foreign else read_hf)(data, layers, where)
    if raw is not None:
        check_pair(config, raw, where, str(target))
    if (source / "mask_embedding.pt").exists():
        raise ConfigError(
            "it has a mask embedding of its own; here the mask token is a row of the target's embedding",
            where=str(source / "mask_embedding.pt"),
        )
    for path in weight_files(source):
        header(path)
    return Given(config, target, raw, foreign)
