"""The target's files, found and read without its weights and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer.errors import ConfigError
from trainer.model.pair import check_tokenizer
from trainer.shortage import is_shortage

RELEASE = Path(__file__).resolve().parents[2]


def find_target(path: str, named_by: str = "train.target.path") -> Path:
    """The target's folder: absolute, else relative to the working folder, else to the deployed release.

    Raises:
        ConfigError: `named_by` names none.
    """
    places = [Path(path)] if Path(path).is_absolute() else [Path.cwd() / path, RELEASE / path]
    places = list(dict.fromkeys(places))  # they are the same where the project itself is the working folder
    for place in places:
        if (place / "config.json").is_file():
            return place
    deployed = ", or deploy the folder with the recipe's deploy.include"
    raise ConfigError(
        f"no target (config.json) at {' or '.join(str(place) for place in places)}",
        where=named_by,
        next="check the path" + (deployed if named_by.startswith("train.") else ""),
    )


def read_config(path: Path) -> dict[str, Any]:
    """The target's config.json, its text part when it also has others.

    Raises:
        ConfigError: no such folder, or not JSON.
    """
    where = str(path / "config.json")
    try:
        data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "no target there", where=where, next="check target.path, or deploy the target's folder"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a JSON file: {error}", where=where) from None
    text = data.get("text_config") or data if isinstance(data, dict) else None
    if not isinstance(text, dict):
        raise ConfigError("not the configuration of a model: keys and values are expected", where=where)
    return {**text, "architectures": data.get("architectures") or text.get("architectures")}


def end_ids(config: Any) -> tuple[int, ...]:
    """The tokens that end a text, of a target's configuration, which names none, one or several; servers end
    texts of their own with the first.
    """
    named = getattr(config, "eos_token_id", None)
    return tuple(named) if isinstance(named, list | tuple) else () if named is None else (named,)


def load_tokenizer(folder: Path, vocabulary: int) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("the target has no tokenizer.json", where=str(path))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        if is_shortage(error):
            raise
        raise ConfigError(f"cannot read the tokenizer: {error}", where=str(path)) from None
    check_tokenizer(tokenizer.get_vocab(), vocabulary, str(path))
    return tokenizer
