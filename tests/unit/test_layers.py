"""Run with: pytest tests/unit/test_layers.py. Which packages may import which."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "dflashctl" / "agent"
# From the ground up: a part imports its own layer's parts and those before it, inside of functions, too.
LAYERS = {
    "dflashctl": (
        "errors interrupt",
        "agent",
        "lab",
        "render",
        "config",
        "remote",
        "gpus",
        "runs",
        "inspect",
        "probe",
        "doctor",
        "views",
        "schemas",
        "cli",
        "start __main__",
    ),
    "trainer": (
        "errors words failures schema config config_rules unread_keys recipe_file needs machine shortage"
        " writing guard culprits",
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


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, module or name in it, from the top package down) of each import, wherever in the file it is."""
    package = path.parent.relative_to(root).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield node.lineno, each.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            for each in node.names:
                yield node.lineno, f"{module}.{each.name}"


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
        for line, name in imports(path, folder.parent):
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if top == folder.name and height.get(other, -1) > height[part]:
                wrong.append(f"{within}:{line}: {part} imports {other}, which stands on it")
    return wrong


@pytest.mark.parametrize("package", LAYERS)
def test_no_part_imports_what_stands_on_it(package: str) -> None:
    assert against(LAYERS[package], ROOT / package) == []


def test_what_is_sent_to_other_machines_imports_itself_and_the_standard_library() -> None:
    own = f"{AGENT.parent.name}.{AGENT.name}"
    foreign = [
        f"{path.name}:{line}: {name}"
        for path in sorted(AGENT.rglob("*.py"))
        for line, name in imports(path, AGENT.parents[1])
        if not f"{name}.".startswith(f"{own}.") and name.partition(".")[0] not in sys.stdlib_module_names
    ]
    assert foreign == []


def test_an_import_inside_of_a_function_counts(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    (folder / "low").mkdir(parents=True)
    (folder / "low" / "one.py").write_text("def f():\n    from made.high.two import g\n    return g\n")
    (folder / "low" / "three.py").write_text("class C:\n    from ..high import two\n    from . import one\n")
    (folder / "new.py").write_text("")
    (folder / "high").mkdir()
    (folder / "high" / "two.py").write_text("import made.low.one\nfrom made import low\n")
    assert against(("low", "high"), folder) == [
        "low/one.py:2: low imports high, which stands on it",
        "low/three.py:2: low imports high, which stands on it",
        "new.py: new is in no layer",
    ]
