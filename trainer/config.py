"""The one way from a recipe's `train:` to a TrainConfig: read, then checked as a whole. Needs no torch.

`check(section)` lists every problem with its key path, so the laptop can refuse a recipe before anything
travels; `load(section)` gives the TrainConfig that the trainer runs by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer import schema
from trainer.config_rules import across_keys
from trainer.errors import ConfigError
from trainer.sections import TrainConfig
from trainer.unread_keys import unread


def check(section: Any) -> list[str]:
    """Every problem of a `train:` section, as "train.key.path: what is wrong"; empty when it can be run.

    Needs no torch and reads no file: whether the target exists is known where the run happens.
    """
    return _read(section)[1]


def warnings(section: Any) -> list[str]:
    """Of a `train:` section without problems: keys that are set and that nothing will read, though they may
    stand there for another topology, in the words of `check`."""
    config, _ = _read(section)
    return [f"train.{each.key}: {each.told}" for each in unread(config) if not each.refused] if config else []


def load(section: Any) -> TrainConfig:
    """The configuration of a `train:` section.

    Raises:
        ConfigError: with every problem on its own line.
    """
    config, problems = _read(section)
    if config is None:
        raise ConfigError("\n".join(problems), next="mend these keys of the recipe")
    return config


def _read(section: Any) -> tuple[TrainConfig | None, list[str]]:
    """The configuration, or else its problems."""
    if not isinstance(section, Mapping):
        return None, [f"train: expected keys and values, found {schema.kind_of(section)}"]
    problems: list[str] = []
    config = schema.build(TrainConfig, section, "", problems)
    if not problems:  # else values may be missing, of which the rules would make more problems
        problems = across_keys(config)
    return (None, [f"train.{problem}" for problem in problems]) if problems else (config, [])
