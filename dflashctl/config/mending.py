"""How a value of the wrong kind would be written right: the `next:` of a problem in hosts.yaml or a recipe.

Only what the value itself shows is offered: text where a list is wanted is cut into words, a lone value where
keys are wanted goes to the one key that takes it. Pure.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

PLAIN = re.compile(r"[A-Za-z./_-][A-Za-z0-9./_+=@-]*")
RESERVED = ("true", "false", "yes", "no", "on", "off", "null", "y", "n", ".inf", ".nan", "-")


def as_list(key: str, value: Any) -> str:
    """For text where a list belongs: `sleep 5` -> `[sleep, "5"]`; "" where it says nothing."""
    if not isinstance(value, str):
        return ""
    try:
        words = shlex.split(value)
    except ValueError:
        return ""
    return f"write {key}: [{', '.join(map(scalar, words))}]" if words else ""


def as_keys(key: str, value: Any, models: list[type[BaseModel]]) -> str:
    """For a lone value where keys belong: `ssh: box` -> `ssh: {host: box}`; "" where no key takes it. For a
    list of settings as others write them: `- A=1` -> `{A: "1"}`."""
    if isinstance(value, list) and value and all(isinstance(each, str) and "=" in each for each in value):
        pairs = (each.partition("=") for each in value)
        return f"write {key}: {{{', '.join(f'{scalar(name)}: {scalar(text)}' for name, _, text in pairs)}}}"
    if not isinstance(value, str | int) or isinstance(value, bool):
        return ""
    for model in models:
        for name in model.model_fields:
            try:
                model.model_validate({name: value})
            except ValidationError:
                continue
            return f"write {key}: {{{name}: {scalar(value)}}}"
    return ""


def as_text(value: Any, written: str) -> str:
    """For what YAML did not read as text: a number, a date, `on`, or braces that were meant as a placeholder.
    `written` is how it stands in the file: to YAML 1.10 is the number 1.1, to its author another version."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value.values())) is None:
        return f'braces begin keys in YAML; put it in quotes: "{{{next(iter(value))}}}"'
    return f'put it in quotes: "{written}"' if written else ""


def as_missing(key: str, options: list[Any], stem: str) -> str:
    """For a key that is not there and has only one right value: `version`, and a recipe's `name`."""
    values = [value for option in options if get_origin(option) is Literal for value in get_args(option)]
    if len(values) == 1:
        return f"write {key}: {values[0]}"
    return f"write {key}: {stem}" if key == "name" else ""


def scalar(value: Any) -> str:
    """As YAML's flow style takes it; text that YAML would read as something else in quotes."""
    if not isinstance(value, str):
        return str(value)
    plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
    return value if plain else json.dumps(value, ensure_ascii=False)
