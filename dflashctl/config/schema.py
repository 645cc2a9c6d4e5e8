"""JSON schemas: hosts.yaml and recipes, for editors; documents of --json. docs/schema/ holds the same."""

from __future__ import annotations

import json

from pydantic import BaseModel

from dflashctl.config.hosts import HostsDocument
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
    schema = KINDS[kind].model_json_schema()
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"dflashctl {kind}"}
    return json.dumps(head | {k: v for k, v in schema.items() if k != "title"}, indent=2) + "\n"
