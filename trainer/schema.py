"""Strict reading of plain data into dataclasses: every key known, every value of its type and in its range.

Problems are collected with their key paths instead of raised one at a time, so a person mends a recipe in one
go. Needs nothing beyond the standard library.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


def ranged(default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with a default and an allowed range, both ends included."""
    return field(default=default, metadata={"low": low, "high": high})


def kind_of(value: Any) -> str:
    """What a person would call this value's type."""
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        type(None): "nothing",
    }
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, list):
        return "a list"
    return names.get(type(value), type(value).__name__)


def nearest(word: str, known: Sequence[str]) -> str:
    """ " (did you mean x?)" for the closest known word, or the list of them when none is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(known)})"


def unknown_value(path: str, value: Any, known: Sequence[str]) -> str:
    return f"{path}: {value!r} is not one of {', '.join(known)}" + (
        nearest(value, known)
        if isinstance(value, str) and difflib.get_close_matches(value, known, n=1)
        else ""
    )


def build(cls: type[T], data: Mapping[str, Any], path: str, problems: list[str]) -> T:
    """An instance of the dataclass `cls` from `data`; what is wrong is appended to `problems`.

    With problems the result may hold defaults or nothing where a value was refused: do not use it.
    """
    hints = typing.get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            problems.append(f"{where}: unknown key{nearest(str(key), sorted(known))}")
            continue
        values[key] = _value(hints[key], value, where, problems, known[key].metadata)
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            problems.append(f"{path}.{name}: needed" if path else f"{name}: needed")
            values[name] = None
    return cls(**values)


def _value(hint: Any, value: Any, path: str, problems: list[str], limits: Mapping[str, Any]) -> Any:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        return None if value is None else _value(inner[0], value, path, problems, limits)
    if origin is Literal:
        choices = list(typing.get_args(hint))
        if value not in choices:
            problems.append(unknown_value(path, value, choices))
        return value
    if origin is list:
        if not isinstance(value, list):
            problems.append(f"{path}: expected a list, found {kind_of(value)}")
            return []
        item = typing.get_args(hint)[0]
        return [_value(item, each, f"{path}[{index}]", problems, {}) for index, each in enumerate(value)]
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            problems.append(f"{path}: expected keys and values, found {kind_of(value)}")
            return None
        return build(typing.cast(type, hint), value, path, problems)
    return _scalar(hint, value, path, problems, limits)


def _scalar(hint: type, value: Any, path: str, problems: list[str], limits: Mapping[str, Any]) -> Any:
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]
    # bool is an int to Python, never to a person; "4e-3" is text to YAML 1.1, and meant as a number.
    if hint is float and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            pass
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        problems.append(f"{path}: expected {expected}, found {kind_of(value)}")
        return value
    low, high = limits.get("low"), limits.get("high")
    if low is not None and not value >= low:
        problems.append(f"{path}: {value} is below {low}")
    if high is not None and not value <= high:
        problems.append(f"{path}: {value} is above {high}")
    elif isinstance(value, float) and math.isinf(value):
        problems.append(f"{path}: expected a number, found {value}")
    return value
