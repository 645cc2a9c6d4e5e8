"""Which target a drafter was made for, told from the target's files without loading its weights.

Sizes do not tell targets apart: a base model, its chat version and another vendor's model of the same shape
all fit one drafter, and it foretells nothing but its own. So a drafter's config.json also holds the kind of
model, a digest of its tokenizer's vocabulary and one of its final norm: a few thousand numbers that training
leaves different in every model, taken as bfloat16, in which targets are served, so that copies in that format
are known again whatever the original's. The name is for people: folders are renamed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import ConfigError
from trainer.model.folder import header, read_floats, weight_files

FINAL_NORM = re.compile(r"(model\.)?(language_model\.)?(model\.)?norm\.weight")
HUB_FOLDER = re.compile(r"models--(.+?)--(.+)")  # .../models--ORG--NAME/snapshots/REVISION


@dataclass(frozen=True)
class TargetIdentity:
    """What is not known is None, and fits everything: published drafters say nothing of it."""

    name: str | None = None
    architecture: str | None = None
    model_type: str | None = None
    tie_word_embeddings: bool | None = None
    tokenizer_sha256: str | None = None
    final_norm_sha256: str | None = None
    weights: str | None = None  # "random": made for measuring; such a drafter foretells nothing

    @property
    def kind(self) -> str:
        return self.architecture or self.model_type or "unknown kind"

    def __str__(self) -> str:
        told = f"{self.name} ({self.kind})" if self.name else "another target"
        return f"{self.weights.upper()} WEIGHTS in the shape of {told}" if self.weights else told

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    def differences(self, here: TargetIdentity) -> list[str]:
        """Where both are known and differ: "key a there, b here". Name and architecture only describe."""
        found = []
        for key in ("model_type", "tie_word_embeddings", "tokenizer_sha256", "final_norm_sha256"):
            mine, other = getattr(self, key), getattr(here, key)
            if mine is not None and other is not None and mine != other:
                found.append(f"{key} {_short(mine)} there, {_short(other)} here")
        if self.weights != here.weights:
            found.append(f"weights {self.weights or 'of files'} there, {here.weights or 'of files'} here")
        return found


def _short(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)[:16]


def from_json(data: Any, where: str) -> TargetIdentity:
    """What a drafter's config.json says; nothing known when it does not say.

    Raises:
        ConfigError: it says something else than an identity.
    """
    if data is None:
        return TargetIdentity()
    names = [field.name for field in dataclasses.fields(TargetIdentity)]
    kinds = {name: bool if name == "tie_word_embeddings" else str for name in names}
    if not isinstance(data, Mapping) or any(
        data.get(name) is not None and not isinstance(data[name], kind) for name, kind in kinds.items()
    ):
        raise ConfigError(f"target_identity is {data!r}, not the identity of a target", where=where)
    return TargetIdentity(**{name: data.get(name) for name in names})


def identify(folder: Path, config: Mapping[str, Any], random: bool = False) -> TargetIdentity:
    """The identity of the target in `folder`; nothing is known of files that cannot be read.

    Args:
        config: its config.json, as `trainer.model.target_files.read_config` gives it.
        random: its weights are not the folder's, but random ones.
    """
    tied = config.get("tie_word_embeddings")
    return TargetIdentity(
        name=name_of(folder),
        architecture=(config.get("architectures") or [None])[0],
        model_type=config.get("model_type"),
        tie_word_embeddings=tied if isinstance(tied, bool) else None,
        tokenizer_sha256=_digest_of_vocabulary(folder / "tokenizer.json"),
        final_norm_sha256=None if random else _digest_of_final_norm(folder),
        weights="random" if random else None,
    )


def name_of(folder: Path) -> str:
    """ORG/NAME of a folder in a hub's cache, else the folder's own name."""
    for part in reversed(folder.resolve().parts):
        if match := HUB_FOLDER.fullmatch(part):
            return f"{match[1]}/{match[2]}"
    return folder.resolve().name


def _digest_of_vocabulary(path: Path) -> str | None:
    """Without added tokens: a person may give a tokenizer more of them, and the others stay the same."""
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=False)
    except Exception:  # all that the library raises; whoever encodes text will say what is wrong
        return None
    lines = sorted(f"{number} {token}\n" for token, number in vocabulary.items())
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _digest_of_final_norm(folder: Path) -> str | None:
    try:
        files = {name: path for path in weight_files(folder) for name in header(path)}
        names = [name for name in files if FINAL_NORM.fullmatch(name)]
        if len(names) != 1:
            return None
        norm = read_floats(files[names[0]], names[0])
    except ConfigError:  # whoever loads the weights will say what is wrong with them
        return None
    bits = np.ascontiguousarray(norm, dtype="<f4").view("<u4").astype("<u8")
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u4") << 16  # to the nearest, ties to even
    return hashlib.sha256(rounded.tobytes()).hexdigest()
