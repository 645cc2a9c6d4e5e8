"""Which environment variables a Python program reads, from its source: no import, no list by hand.

A read is `os.environ["X"]`, `"X" in os.environ`, a call with the name as its first argument of anything whose
own name speaks of the environment (`os.getenv`, `environ.get`, `env_bool`, `_get_tristate_env`) or of a
function that passes its argument on to such a read, and the keywords `env_name_default=` and
`env_name_force=` of torch's Config. A name that is put together at run time is not found.
"""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterator
from typing import TypeGuard

NAME = re.compile(r"[A-Z][A-Z0-9_]{2,}")
KEYWORDS = ("env_name_default", "env_name_force")
WRITERS = ("set", "put", "unset", "del")
CONSTANT = re.compile(r"""^\s*(\w+)(?:\s*:[^=\n]+)?\s*=\s*["']([A-Z][A-Z0-9_]+)["']\s*$""", re.MULTILINE)
STARTS = ("def", "async def ", "class ", "@")
TELLING = r"environ|getenv|env_name|env\w*\("
WORTH_PARSING = re.compile(TELLING.encode())


class Source:
    """One parsed file. Raises SyntaxError (ValueError for NUL bytes) on making.

    Only what spans a line that tells of the environment is parsed and looked at: torch has 12 MB of such
    files.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.constants = dict(CONSTANT.findall(text))
        self.readers: set[str] = set()
        self._parse(TELLING)
        self.readers = {
            each.name for each in self._walk(self.tree) if _function(each) and self._passes_on(each)
        }
        if self.readers:
            self._parse("|".join([TELLING, *(rf"\b{name}\(" for name in sorted(self.readers))]))

    def _parse(self, telling: str, *, whole: bool = False) -> None:
        look = re.compile(telling)
        lines = self._text.split("\n")
        self._lines = [number for number, line in enumerate(lines, 1) if look.search(line)]
        try:
            self.tree = ast.parse(self._text if whole else _thinned(lines, self._lines))
        except SyntaxError:  # a string had lines that look like code, and was cut
            self.tree = ast.parse(self._text)

    def names(self, within: ast.AST | None = None) -> set[str]:
        """Variables that are read in the file, or in one node of it."""
        found: set[str] = set()
        for node in self._walk(self.tree if within is None else within):
            found.update(name for name in self._read(node) if NAME.fullmatch(name))
        return found

    def _walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes below that span a telling line."""
        first = getattr(node, "lineno", None)
        if first is not None:
            at = bisect.bisect_left(self._lines, first)
            if at == len(self._lines) or self._lines[at] > getattr(node, "end_lineno", first):
                return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child)

    def options(self) -> dict[str, list[str]]:
        """Of a configuration module: {option: [variables that its value comes from]}; an option of a class in
        it is `class.option`. A function of the file that the value calls counts with all that it reads."""
        self._parse(TELLING, whole=True)
        self.functions = {each.name: each for each in self.tree.body if _function(each)}
        found: dict[str, set[str]] = {}
        for option, value in _assignments(self.tree.body, ""):
            found.setdefault(option, set()).update(self._with_calls(value, set()))
        return {option: sorted(names) for option, names in found.items() if names}

    def _with_calls(self, node: ast.AST, seen: set[str]) -> set[str]:
        found = self.names(node)
        for call in ast.walk(node):
            name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
            if name in self.functions and name not in seen:
                found |= self._with_calls(self.functions[name], seen | {name})
        return found

    def _read(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Subscript) and _dotted(node.value).endswith("environ"):
            if isinstance(node.ctx, ast.Load):
                yield from self._name(node.slice)
        elif isinstance(node, ast.Compare):
            if isinstance(node.ops[0], (ast.In, ast.NotIn)) and _dotted(node.comparators[0]).endswith(
                "environ"
            ):
                yield from self._name(node.left)
        elif isinstance(node, ast.Call):
            if node.args and self._reads(node.func):
                yield from self._name(node.args[0])
            for keyword in node.keywords:
                if keyword.arg in KEYWORDS:
                    several = isinstance(keyword.value, (ast.List, ast.Tuple))
                    for each in keyword.value.elts if several else [keyword.value]:  # type: ignore[attr-defined]
                        yield from self._name(each)

    def _reads(self, function: ast.AST) -> bool:
        called = _dotted(function)
        last = called.rpartition(".")[2].lstrip("_")
        speaks = "environ." in called or "env" in last.lower()
        return (speaks and not last.startswith(WRITERS)) or last in self.readers or called in self.readers

    def _passes_on(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        """Does it hand a parameter of its own to the environment?"""
        own = {each.arg for each in [*function.args.posonlyargs, *function.args.args]}
        for node in self._walk(function):
            asked: ast.AST | None = None
            if isinstance(node, ast.Subscript) and _dotted(node.value).endswith("environ"):
                asked = node.slice
            elif isinstance(node, ast.Call) and node.args:
                called = _dotted(node.func)
                asked = node.args[0] if called.endswith(("environ.get", "getenv")) else None
            if isinstance(asked, ast.Name) and asked.id in own:
                return True
        return False

    def _name(self, node: ast.AST) -> Iterator[str]:
        text = _text(node)
        if text is None and isinstance(node, ast.Name):
            text = self.constants.get(node.id)
        if text is not None:
            yield text


def _thinned(lines: list[str], telling: list[int]) -> str:
    """Without the functions and classes that have no telling line; every line keeps its number."""
    kept: list[str] = []
    decorated = False
    start = 0
    for number, line in enumerate([*lines, "def"]):
        if not line.startswith(STARTS):
            continue
        if not decorated:
            at = bisect.bisect_right(telling, start)
            block = lines[start:number]
            spans = start == 0 or (at < len(telling) and telling[at] <= number)
            kept += block if spans else [""] * len(block)
            start = number
        decorated = line.startswith("@")
    return "\n".join(kept)


def _function(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _assignments(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """(option, what its value depends on) at the level of a module or class; `if` and `try` are looked
    into."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _assignments(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.If):
            for option, value in _assignments([*statement.body, *statement.orelse], prefix):
                yield option, statement.test
                yield option, value
        elif isinstance(statement, ast.Try):
            inner = [*statement.body, *statement.orelse, *statement.finalbody]
            for handler in statement.handlers:
                inner += handler.body
            yield from _assignments(inner, prefix)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, statement.value
        elif (
            isinstance(statement, ast.AnnAssign)
            and statement.value
            and isinstance(statement.target, ast.Name)
        ):
            yield prefix + statement.target.id, statement.value


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _dotted(node: ast.AST) -> str:
    """`os.environ.get` of the node for it; "" for anything that is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return ""
