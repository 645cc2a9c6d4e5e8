"""JSON schemas: hosts.yaml and recipes, for editors; documents of --json. docs/schema/ holds the same."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from dflashctl.config.hosts import HostsDocument, Strict
from dflashctl.config.notes import notes
from dflashctl.config.recipe import Recipe
from dflashctl.doctor.document import DoctorDocument
from dflashctl.inspect.document import AnyInspectDocument
from dflashctl.probe.document import AnyProbeDocument

KINDS: dict[str, type[BaseModel]] = {
    "hosts": HostsDocument,
    "recipe": Recipe,
    "doctor": DoctorDocument,
    "inspect": AnyInspectDocument,
    "probe": AnyProbeDocument,
}


def schema_text(kind: str) -> str:
    """The schema of a kind as JSON text. Raises KeyError for another word."""
    model = KINDS[kind]
    schema = model.model_json_schema()
    for part, properties in ((name, each.get("properties", {})) for name, each in schema["$defs"].items()):
        _describe(part, properties)
    _describe(model.__name__, schema.get("properties", {}))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"dflashctl {kind}"}
    return json.dumps(head | {k: v for k, v in schema.items() if k != "title"}, indent=2) + "\n"


def _describe(name: str, properties: dict[str, dict[str, Any]]) -> None:
    """For the files that people write: an editor shows what the source says beside each key."""
    for model in _below(Strict):
        for key, words in notes(model).items() if model.__name__ == name else ():
            if key in properties:
                properties[key]["description"] = words


def _below(cls: type[BaseModel]) -> list[type[BaseModel]]:
    return [each for sub in cls.__subclasses__() for each in (sub, *_below(sub))]
