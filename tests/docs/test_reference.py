"""docs/recipe.md, docs/hosts.md and docs/schema/ are what the source says, key by key.

Run: python -m pytest tests/docs/test_reference.py (after a change of a key: make schema)
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", REPOSITORY / "docs" / "reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["reference"] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def test_what_lies_here_is_what_the_source_says(reference: ModuleType) -> None:
    stale = [path.name for path, text in reference.files().items() if path.read_text() != text]
    assert not stale, "run `make schema`"


@pytest.mark.parametrize("page", ["recipe.md", "hosts.md"])
def test_every_key_has_a_type_and_a_meaning(page: str) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", (REPOSITORY / "docs" / page).read_text(), re.MULTILINE)
    keys = {name: re.split(r"(?<!\\\\) \| ", rest) for name, rest in rows if not name.startswith("{")}
    assert len(keys) > 30
    bare = [name for name, cells in keys.items() if len(cells) != 3 or not cells[0] or not cells[2]]
    assert not bare, "say in the source, beside the field, what it means"


def paths(value: object, above: str = "") -> set[str]:
    """The key paths of a document as the pages write them."""
    if isinstance(value, dict):
        return {f"{above}{key}" for key in value} | {
            path for key, each in value.items() for path in paths(each, f"{above}{key}.")
        }
    if isinstance(value, list):
        return {path for each in value for path in paths(each, f"{above[:-1]}[].")}
    return set()


@pytest.mark.parametrize("name", ["demo", "threadwarm"])
def test_every_key_of_a_shipped_recipe_is_on_the_page(name: str) -> None:
    text = (REPOSITORY / "docs" / "recipe.md").read_text()
    recipe = yaml.safe_load((REPOSITORY / "recipes" / f"{name}.yaml").read_text())
    free = ("launch.env.", "variants.")
    used = {path for path in paths(recipe) if not path.startswith(free)}
    assert not {path for path in used if f"| `{path}` |" not in text}
