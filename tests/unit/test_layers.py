"""Run with: pytest tests/unit/test_layers.py. Which packages may import which, and no files in a circle."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "dflashctl" / "agent"
# From the ground up: a part imports its own layer's parts and those before it, inside of functions, too.
LAYERS = {
    "dflashctl": (
        "errors interrupt person",
        "agent",
        "lab",
        "render",
        "config",
        "remote",
        "gpus",
        "releases runs",
        "logs history",
        "inspect",
        "probe",
        "doctor",
        "views",
        "schemas",
        "cli",
        "start __main__",
    ),
    "dflashctl/agent": (
        "payload",
        "processes",
        "records",
        "logs releases",
        "gpus",
        "runs",
        "history doctor",
        "main",
    ),
    "trainer": (
        "errors words failures schema",
        "sections",
        "unread_keys",
        "config_rules",
        "config",
        "recipe_file needs machine shortage writing guard culprits",
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


def imports(path: Path, root: Path, for_types: bool = True) -> Iterator[tuple[int, str]]:
    """(line, module or name in it, from the top package down) of each import, wherever in the file it is.

    Args:
        for_types: those under TYPE_CHECKING, too.
    """
    package = path.parent.relative_to(root).parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    never_run = {
        inner
        for node in ast.walk(tree)
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in never_run:
            continue
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


def circles(folder: Path) -> list[str]:
    """Files that import each other, each circle once: "a.py:3 -> b.py:9 -> a.py", lines of the imports."""
    files = {_module(path, folder.parent): path for path in sorted(folder.rglob("*.py"))}
    uses: dict[str, dict[str, int]] = {module: {} for module in files}
    for module, path in files.items():
        for line, name in imports(path, folder.parent, for_types=False):
            used = name if name in files else name.rpartition(".")[0]
            if used in files and used != module:
                uses[module].setdefault(used, line)
    found, known = [], set()
    for start in files:
        circle = _way_back(start, uses)
        if circle and known.isdisjoint(circle):
            known |= {*circle}
            steps = zip(circle, [*circle[1:], start], strict=True)
            shown = [f"{files[here].relative_to(folder)}:{uses[here][there]}" for here, there in steps]
            found.append(" -> ".join([*shown, str(files[start].relative_to(folder))]))
    return found


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _way_back(start: str, uses: Mapping[str, Iterable[str]]) -> list[str]:
    """The shortest chain of imports from a module to itself, begun with it; empty where there is none."""
    came_from: dict[str, str] = {}
    reached = [start]
    for here in reached:  # which grows
        for there in uses[here]:
            if there == start:
                way = [here]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if there not in came_from:
                came_from[there] = here
                reached.append(there)
    return []


@pytest.mark.parametrize("package", LAYERS)
def test_no_part_imports_what_stands_on_it(package: str) -> None:
    assert against(LAYERS[package], ROOT / package) == []


@pytest.mark.parametrize("package", LAYERS)
def test_no_files_import_each_other(package: str) -> None:
    assert circles(ROOT / package) == []


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


def test_a_circle_is_told_with_the_line_of_each_import(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "deep" / "__init__.py").write_text("VALUE = 1\n")
    (folder / "deep" / "one.py").write_text("import sys\nfrom ..two import f\nfrom . import VALUE\n")
    (folder / "two.py").write_text("def f():\n    import made.three\n")
    (folder / "three.py").write_text("from made import deep\nfrom made.deep import one\n")
    (folder / "aside.py").write_text("from made import two, aside\n")
    (folder / "typed.py").write_text("from made.user import g\n")
    (folder / "user.py").write_text(
        "import typing\nif typing.TYPE_CHECKING:\n    from made.typed import T\nelse:\n    import made.two\n"
    )
    assert circles(folder) == ["deep/one.py:2 -> two.py:2 -> three.py:2 -> deep/one.py"]
