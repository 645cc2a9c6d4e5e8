"""JSON schema of hosts.yaml and of recipes, for editors. docs/schema/ holds the same text."""

from __future__ import annotations

import json

from pydantic import BaseModel

from dflashctl.config.hosts import HostsDocument
from dflashctl.config.recipe import Recipe

KINDS: dict[str, type[BaseModel]] = {"hosts": HostsDocument, "recipe": Recipe}


def schema_text(kind: str) -> str:
    """The schema of `hosts` or `recipe` as JSON text. Raises KeyError for another word."""
    schema = KINDS[kind].model_json_schema()
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"dflashctl {kind}"}
    return json.dumps(head | {k: v for k, v in schema.items() if k != "title"}, indent=2) + "\n"
