"""What `eval` is given, read from small files and headers alone.

No torch in here: the command line asks this first, so what cannot work is refused before seconds go by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from trainer.data.chat_template import Mode
from trainer.data.encoding import Encoder
from trainer.evaluation.prompt_sets import PromptSet, questions
from trainer.model.drafter_config import DrafterConfig, read_drafter_config
from trainer.model.folder import WEIGHTS, header
from trainer.model.pair import check_pair, dimension
from trainer.model.target_files import find_target, load_tokenizer, read_config


@dataclass(frozen=True)
class Questions:
    """Files of evaluation sets, and how the target's template asks them."""

    files: list[Path]
    mode: Mode = field(default_factory=Mode)
    template_file: Path | None = None

    def read(self, target: Path, encoder: Encoder, limit: int) -> list[PromptSet]:
        return questions(self.files, target, encoder, self.mode, self.template_file, limit)


@dataclass(frozen=True)
class Pair:
    """A drafter's shape, and the target that it was made for: its folder and its tokenizer."""

    shape: DrafterConfig
    target: Path
    encoder: Encoder


def read_pair(folder: Path, target_path: str) -> Pair:
    """The drafter in `folder` and its target.

    Raises:
        ConfigError: one of them is not there or not readable, or they do not belong together.
    """
    place = find_target(target_path, named_by="--target")
    raw, shape = read_config(place), read_drafter_config(folder)
    check_pair(shape, raw, str(folder), str(place))
    load_tokenizer(place, dimension(raw, "vocab_size"))  # refuses one that does not fit
    header(folder / WEIGHTS)
    return Pair(shape, place, Encoder(place))
