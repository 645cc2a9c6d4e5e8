"""The agent's sources keep to their promise: old Python, standard library, relative imports.

Run: python -m pytest tests/local/test_agent_call_portable.py
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dflashctl.agent
from dflashctl.agent import payload
from dflashctl.config.hosts import Host
from dflashctl.remote.agent_call import call
from dflashctl.remote.local import LocalEngine

SOURCES = sorted(Path(dflashctl.agent.__file__).parent.rglob("*.py"))

NEWER_METHODS = {"removeprefix", "removesuffix", "readlink", "is_relative_to", "bit_count", "hardlink_to"}
OLD_ENOUGH = {"os.readlink"}
BUILTIN_GENERICS = {"list", "dict", "tuple", "set", "frozenset", "type"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_grammar_is_that_of_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(), filename=str(path), feature_version=(3, 8))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_are_relative_or_of_the_standard_library(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names, f"{path.name}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_annotations_are_not_evaluated_and_nothing_newer_is_called(path: Path) -> None:
    tree = ast.parse(path.read_text())
    future = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for node in ast.iter_child_nodes(tree)
    )
    assert future or not any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree)), path.name
    for node in evaluated(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) not in OLD_ENOUGH:
            assert node.attr not in NEWER_METHODS, (
                f"{path.name}:{node.lineno}: .{node.attr} is newer than 3.8"
            )
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            assert node.value.id not in BUILTIN_GENERICS, f"{path.name}:{node.lineno}: {node.value.id}[...]"
        if isinstance(node, ast.Call):
            keywords = {keyword.arg for keyword in node.keywords}
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            assert not (name == "zip" and "strict" in keywords), f"{path.name}:{node.lineno}: zip(strict=)"
            assert not (name == "dataclass" and keywords & {"slots", "kw_only"}), f"{path.name}:{node.lineno}"


def evaluated(tree: ast.AST) -> list[ast.AST]:
    """All nodes but those of annotations."""
    found: list[ast.AST] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        found.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            stack += [
                each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)
            ]
    return found


def interpreters() -> list[str]:
    """This one, and every other CPython >= 3.8 that the machine has under a usual name."""
    names = [shutil.which(f"python3.{minor}") for minor in range(8, 16)]
    names += [str(path) for path in Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python")]
    found: dict[str, str] = {}
    for name in [sys.executable, *filter(None, names)]:
        asked = subprocess.run(
            [name, "-c", "import sys; print(sys.version_info >= (3, 8), sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if asked.stdout.startswith("True "):
            found.setdefault(asked.stdout, name)
    return sorted(found.values())


def test_every_python_of_this_machine_imports_all_of_it_and_answers(tmp_path: Path) -> None:
    archive = tmp_path / "agent.zip"
    archive.write_bytes(payload.build_payload())
    names = [path.relative_to(SOURCES[0].parent).with_suffix("").parts for path in SOURCES]
    modules = [".".join(("dflash_agent", *name)) for name in names if name[-1] != "__init__"]
    assert "dflash_agent.processes.proc" in modules
    script = (
        f"import importlib, sys\nsys.path.insert(0, {str(archive)!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    for python in interpreters():
        done = subprocess.run(
            [python, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{python}: {done.stderr}"
        host = Host(name="here", engine="local", python=python, **dict.fromkeys(PLACES, str(tmp_path)))
        assert call(LocalEngine(host), "ping", {"echo": python}, timeout_s=30)["echo"] == python


PLACES = ("home", "code_root", "workdir", "log_dir", "state_dir")


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) >= 5
