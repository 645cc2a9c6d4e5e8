"""From pydantic's errors to what a person reads: key path, place in the file, nearest valid key."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable
from datetime import date
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dflashctl.config import mending
from dflashctl.config.yamlfile import Document, Loc
from dflashctl.errors import UsageError

Model = TypeVar("Model", bound=BaseModel)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name most like `word`, or None when nothing is."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return found[0] if found else None


def key_path(loc: Loc) -> str:
    """('hosts', 'ct200', 'env', 0) -> hosts.ct200.env[0]."""
    text = ""
    for step in loc:
        text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else str(step))
    return text


def validate(model: type[Model], document: Document, *, kind: str) -> Model:
    """Check a whole document. Raises UsageError that names every wrong key with its place."""
    if not isinstance(document.data, dict):
        found = "is empty" if document.data is None else f"holds a {_yaml_type(document.data)}"
        raise UsageError(
            f"{kind} must be a mapping of keys and values, but this {found}", where=str(document.path)
        )
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise usage_error(problems(model, error, document)) from None


def usage_error(found: list[tuple[str, str, str]]) -> UsageError:
    """One exception for a list of (where, what, next)."""
    where, what, next_step = found[0]
    more = [f"{w}: {t}" + (f" ({n})" if n else "") for w, t, n in found[1:]]
    return UsageError("\n".join([what, *more]), where=where, next=next_step)


def problems(
    model: type[BaseModel], error: ValidationError, document: Document, prefix: Loc = ()
) -> list[tuple[str, str, str]]:
    """(where, what, next) for each wrong key, in the order of the file.

    `prefix` is where in the document the validated data came from (a variant's part of a recipe).
    """
    by_path: dict[tuple[str | int, ...], list[dict[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        loc = _without_union_tags(model, detail["loc"])
        by_path.setdefault(loc, []).append({**detail, "loc": loc})
    meant = {(*loc[:-1], _meant(model, loc)) for loc, rows in by_path.items() if _is(rows, "extra_forbidden")}
    rows = []
    for loc, details in by_path.items():
        if _is(details, "missing") and loc in meant:
            continue  # it is there, only misspelt, and that is said
        full = (*prefix, *loc) if document.depth((*prefix, *loc)) > len(prefix) or not loc else loc
        row = (document.position(full), *_describe(model, full, loc, details, document))
        rows.append((document.order(full), row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _is(details: list[dict[str, Any]], kind: str) -> bool:
    return bool(details[0]["type"] == kind)


def _meant(model: type[BaseModel], loc: Loc) -> str | None:
    return nearest(str(loc[-1]), fields_at(model, loc[:-1]))


def _describe(
    model: type[BaseModel],
    full: Loc,
    loc: tuple[str | int, ...],
    details: list[dict[str, Any]],
    document: Document,
) -> tuple[str, str]:
    path = key_path(full)
    detail = details[0]
    if detail["type"] == "extra_forbidden":
        known = fields_at(model, loc[:-1])
        close = _meant(model, loc)
        hint = f"did you mean '{close}'?" if close else f"valid keys here: {', '.join(sorted(known))}"
        return f"unknown key: {path}", hint
    if detail["type"] == "missing":
        return f"missing key: {path}", mending.as_missing(
            str(loc[-1]), _types_at(model, loc), document.path.stem
        )
    if detail["type"] == "value_error":
        return f"{path}: {detail['ctx']['error']}" if path else str(detail["ctx"]["error"]), ""
    if detail["type"] in ("too_short", "string_too_short"):
        return f"{path}: must not be empty", ""
    wishes = " or ".join(dict.fromkeys(d["msg"].removeprefix("Input should be ") for d in details))
    wishes = re.sub(r" or instance of \w+", "", wishes)  # the name of a class of ours
    wishes = wishes.replace("a valid dictionary", "keys and values")
    shown = _shorten(detail.get("input"))
    hint = ""
    if path == "version":
        hint = "this file is for another dflashctl; upgrade, or write version: 1"
    elif "string" in detail["type"]:
        hint = mending.as_text(detail.get("input"), document.written(full))
    elif detail["type"] in ("list_type", "tuple_type"):
        hint = mending.as_list(str(loc[-1]), detail.get("input"))
    elif detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        hint = mending.as_keys(str(loc[-1]), detail.get("input"), _models(_types_at(model, loc)))
    return f"{path}: should be {wishes}, but is {shown}", hint


def _shorten(value: Any) -> str:
    if isinstance(value, bool | int | float | type(None)):
        return f"{_yaml_scalar(value)} ({_yaml_type(value)})"
    text = str(value) if isinstance(value, date) else repr(value)
    return (text if len(text) <= 60 else text[:57] + "...") + f" ({_yaml_type(value)})"


def _yaml_scalar(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _yaml_type(value: Any) -> str:
    names = {
        dict: "mapping",
        list: "list",
        str: "text",
        bool: "true/false value",
        int: "number",
        float: "number",
    }
    return names.get(type(value), "empty value" if value is None else type(value).__name__)


# --- walking the models -------------------------------------------------------------------------------------


def _options(annotation: Any) -> list[Any]:
    """The alternatives of a type, unwrapping Optional, unions and Annotated."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _options(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in _options(part)]
    return [annotation]


def _step(annotations: list[Any], step: str | int) -> list[Any]:
    """The types one key (or index) further down; empty when no alternative has it."""
    found: list[Any] = []
    for annotation in annotations:
        origin = get_origin(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(str(step))
            found += _options(field.annotation) if field else []
        elif origin is dict and isinstance(step, str):
            found += _options(get_args(annotation)[1])
        elif origin in (list, tuple) and isinstance(step, int):
            found += _options(get_args(annotation)[0])
    return found


def fields_at(model: type[BaseModel], loc: Loc) -> list[str]:
    """Names of the keys that are valid under `loc`."""
    return [name for each in _models(_types_at(model, loc)) for name in each.model_fields]


def _types_at(model: type[BaseModel], loc: Loc) -> list[Any]:
    """The types that the value at `loc` may have."""
    here: list[Any] = [model]
    for step in loc:
        here = _step(here, step)
    return here


def _models(annotations: list[Any]) -> list[type[BaseModel]]:
    return [each for each in annotations if isinstance(each, type) and issubclass(each, BaseModel)]


def _without_union_tags(model: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """loc without what pydantic adds and nobody wrote: the tried alternatives of a union, and '[key]'."""
    here: list[Any] = [model]
    kept: list[str | int] = []
    for number, step in enumerate(loc):
        below = _step(here, step)
        if step == "[key]":  # the key before this one is at fault, not its value
            continue
        if below:
            here = below
            kept.append(step)
            continue
        tag_of_union = len(here) > 1 or any(get_origin(a) is dict for a in here)
        if tag_of_union and number:
            names = {getattr(a, "__name__", str(a)) for a in here}
            match = [a for a in here if getattr(a, "__name__", str(a)) == step]
            if step in names or str(step).startswith(("literal[", "dict[", "list[")):
                here = match or here
                continue
        kept.append(step)
        here = []
    return tuple(kept)
