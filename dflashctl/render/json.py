"""JSON for programs: one document on stdout, its first key the schema's name and version."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from dflashctl.render.secrets import masked

_documents = 0


def begin() -> None:
    """A new command, which has printed nothing yet."""
    global _documents
    _documents = 0


def begun() -> bool:
    """Whether the command has made a document: then its end, good or bad, adds no other."""
    return _documents > 0


def finite(value: Any) -> Any:
    """NaN and the infinities (a loss may be one) become null: JSON has no word for them. Masks secrets."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


def document(schema: str, payload: Mapping[str, Any]) -> str:
    """`schema` is a name with a version: "dflashctl.status/1"."""
    name, _, version = schema.rpartition("/")
    if not name.startswith("dflashctl.") or not version.isdigit():
        raise ValueError(f"not a schema name with a version: {schema!r}")
    if "schema" in payload:
        raise ValueError("the payload has a key named schema")
    global _documents
    _documents += 1
    # ASCII escapes: no control or direction character of a log line acts on the terminal that shows this.
    return json.dumps({"schema": schema, **finite(payload)}, indent=2, ensure_ascii=True, allow_nan=False)


def emit(schema: str, payload: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print the document and flush, so that a pipe sees it whole."""
    stream = file or sys.stdout
    stream.write(document(schema, payload) + "\n")
    stream.flush()
