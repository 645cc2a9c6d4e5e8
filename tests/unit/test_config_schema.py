"""The schemas that editors read are those of the models, and the shipped files point at them.

Run: python -m pytest tests/unit/test_config_schema.py (after a change of a model: make schema)
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dflashctl.schemas import KINDS, schema_text

PROJECT = Path(__file__).parents[2]
HINT = "# yaml-language-server: $schema="


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_stored_schema_is_the_models_own(kind: str) -> None:
    stored = (PROJECT / "docs" / "schema" / f"{kind}.json").read_text()
    assert stored == schema_text(kind), "write it anew: make schema"


@pytest.mark.parametrize("file", ["hosts.yaml", "recipes/demo.yaml", "recipes/threadwarm.yaml"])
def test_the_hint_of_a_shipped_file_leads_to_a_schema(file: str) -> None:
    path = PROJECT / file
    hints = [line for line in path.read_text().splitlines() if line.startswith(HINT)]
    assert len(hints) == 1
    target = (path.parent / hints[0].removeprefix(HINT)).resolve()
    assert json.loads(target.read_text())["$schema"].startswith("https://json-schema.org/")


@pytest.mark.parametrize(
    ("kind", "file"),
    [("hosts", "hosts.yaml"), ("recipe", "recipes/demo.yaml"), ("recipe", "recipes/threadwarm.yaml")],
)
def test_every_key_of_the_shipped_files_is_in_the_schema(kind: str, file: str) -> None:
    schema = json.loads(schema_text(kind))
    document = yaml.safe_load((PROJECT / file).read_text())
    assert set(document) <= set(schema["properties"])
    assert set(schema["required"]) <= set(document)
