"""What the source says about the fields of a class: the comments beside them. The pages of all keys and the
schemas that editors read are made of these, so what they say cannot drift from the code.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize


def notes(cls: type) -> dict[str, str]:
    """{field: its comment}, of the class and what it inherits: behind the field, else above it."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if "__annotations__" in vars(each) and each.__module__.partition(".")[0] in ("dflashctl", "trainer"):
            found |= _own_notes(textwrap.dedent(inspect.getsource(each)))
    return found


def told(cls: type) -> str:
    """The class's own docstring, its first paragraph on one line; "" without one."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    return "" if text.startswith(f"{cls.__name__}(") else re.sub(r"\s+", " ", text.split("\n\n")[0]).strip()


def _own_notes(source: str) -> dict[str, str]:
    behind: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            by_itself = not token.line[: token.start[1]].strip()
            (alone if by_itself else behind)[token.start[0]] = token.string.lstrip("#").strip()
    found = {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        words = [behind[line] for line in lines if line in behind]
        if not words:
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            words = [alone[line] for line in range(first, node.lineno)]
        if words:
            found[node.target.id] = " ".join(words)
    return found
