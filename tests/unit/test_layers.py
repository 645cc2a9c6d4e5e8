"""Run with: pytest tests/unit/test_layers.py. Which packages may import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the ground up: a part imports its own layer's parts and those before it, inside of functions, too.
LAYERS = {
    "trainer": (
        "errors words failures schema config config_rules recipe_file needs machine writing guard culprits",
        "process",
        "model",
        "compile_policy",
        "data",
        "training",
        "checkpoint",
        "export",
        "evaluation",
        "topology",
        "run",
        "bench",
        "cli pretrain __main__",
    ),
}


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, part of the package) of each import of it, wherever in the file it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            names = [f"{package}.{each.name}" for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        else:
            continue
        for name in names:
            assert not name.startswith("."), f"line {node.lineno}: imports are absolute here"
            top, _, rest = name.partition(".")
            if top == package and rest:
                yield node.lineno, rest.partition(".")[0]


def against(layers: Sequence[str], folder: Path) -> list[str]:
    """What breaks the order: each import of a higher layer, each part that has none."""
    height = {part: number for number, parts in enumerate(layers) for part in parts.split()}
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        within = path.relative_to(folder)
        part = within.parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        if part not in height:
            wrong.append(f"{within}: {part} is in no layer")
            continue
        for line, other in imports(path.read_text(encoding="utf-8"), folder.name):
            if height.get(other, -1) > height[part]:
                wrong.append(f"{within}:{line}: {part} imports {other}, which stands on it")
    return wrong


@pytest.mark.parametrize("package", LAYERS)
def test_no_part_imports_what_stands_on_it(package: str) -> None:
    assert against(LAYERS[package], ROOT / package) == []


def test_an_import_inside_of_a_function_counts(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    (folder / "low").mkdir(parents=True)
    (folder / "low" / "one.py").write_text("def f():\n    from made.high.two import g\n    return g\n")
    (folder / "new.py").write_text("")
    (folder / "high").mkdir()
    (folder / "high" / "two.py").write_text("import made.low.one\nfrom made import low\n")
    assert against(("low", "high"), folder) == [
        "low/one.py:2: low imports high, which stands on it",
        "new.py: new is in no layer",
    ]
