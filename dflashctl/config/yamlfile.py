"""A YAML file with the place of every key, so that an error can say file:line:column and the key path."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflashctl.errors import UsageError

Loc = Sequence[str | int]
"""Keys and list indices from the top of the document, as pydantic reports them."""

MAX_BYTES = 1 << 20
"""Nobody writes a megabyte of settings by hand: a wrong file (a log, a checkpoint) is refused, not parsed."""


MAX_NODES = 100_000
"""So many values with every alias (`*name`) written out: a few lines of aliases of aliases make millions."""


class _Misread(yaml.constructor.ConstructorError):
    """Valid, and not what a person reads there."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML's own rule; PyYAML lets the last one win silently)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            identity = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if identity in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            if identity and key.tag != "tag:yaml.org,2002:merge":
                seen.add(identity)
        return super().construct_mapping(node, deep)

    def plain_int(self, node: yaml.ScalarNode) -> int:
        """YAML 1.1 reads 0200 as 128 and 22:30 as 1350; whoever wrote that meant something else."""
        if re.fullmatch(r"[-+]?0[0-9_]+|.*:.*", node.value):
            number = self.construct_yaml_int(node)
            raise _Misread(None, None, f"{node.value} is the number {number} to YAML", node.start_mark)
        return self.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.plain_int)


@dataclass(frozen=True)
class Document:
    """Plain data and the node tree it came from. `path` is only for messages."""

    path: Path
    data: Any
    root: yaml.Node | None

    def position(self, loc: Loc, *, of_key: bool = True) -> str:
        """`file:line:column` of the deepest part of `loc` that exists in the file.

        `of_key` points at the key itself (an unknown key), otherwise at its value (a wrong value).
        """
        mark = self._mark(loc, of_key)
        return f"{self.path}:{mark.line + 1}:{mark.column + 1}" if mark else str(self.path)

    def order(self, loc: Loc) -> tuple[int, int]:
        """Sorts locations as they stand in the file."""
        mark = self._mark(loc, True)
        return (mark.line, mark.column) if mark else (0, 0)

    def _mark(self, loc: Loc, of_key: bool) -> yaml.Mark | None:
        mark = self.root.start_mark if self.root else None
        node = self.root
        for step in loc:
            found = _child(node, step)
            if found is None:
                break
            key, node = found
            mark = key.start_mark if of_key else node.start_mark
        return mark

    def written(self, loc: Loc) -> str:
        """The characters of an unquoted value, as the person wrote them; "" for anything else."""
        node = self.root
        for step in loc:
            found = _child(node, step)
            node = found[1] if found is not None else None
        return node.value if isinstance(node, yaml.ScalarNode) and node.style is None else ""

    def depth(self, loc: Loc) -> int:
        """How many leading steps of `loc` exist in the file."""
        node = self.root
        for number, step in enumerate(loc):
            found = _child(node, step)
            if found is None:
                return number
            node = found[1]
        return len(loc)


def _child(node: yaml.Node | None, step: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == str(step):
                return key, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step]
    return None


def read_document(path: Path) -> Document:
    """Parse one YAML file. Raises UsageError with line and column for anything that is not YAML."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"is no settings file: it is larger than {MAX_BYTES:,} bytes", where=str(path))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError("is not UTF-8 text", where=f"{path}:{line}", next="save it as UTF-8") from error
    return parse_document(text, path)


def parse_document(text: str, path: Path) -> Document:
    """Parse YAML text; `path` names it in messages."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is not None:
                _check_aliases(root, path)
            data = loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, path) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise UsageError(
            f"a character that YAML does not allow: #x{error.character:04x}", where=f"{path}:{line}:{column}"
        ) from error
    except RecursionError as error:
        raise UsageError("is nested too deeply to be a settings file", where=str(path)) from error
    except ValueError as error:  # a timestamp or number that only looks like one, such as 2024-13-45
        raise UsageError(
            f"a value cannot be read: {error}", where=str(path), next="put it in quotes"
        ) from error
    return Document(path, data, root)


def _check_aliases(root: yaml.Node, path: Path) -> None:
    """Raises UsageError for aliases that lead back to themselves, or that stand for more than MAX_NODES."""
    sizes: dict[int, int] = {}
    around: set[int] = set()

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in around:
            raise _at(node, path, "a value that holds itself (an alias within its own anchor)")
        if id(node) not in sizes:
            around.add(id(node))
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(each,) for each in node.value]
            sizes[id(node)] = 1 + sum(size(part) for pair in pairs for part in pair)
            around.remove(id(node))
            if sizes[id(node)] > MAX_NODES:
                raise _at(node, path, f"its aliases stand for more than {MAX_NODES:,} values")
        return sizes[id(node)]

    size(root)


def _at(node: yaml.Node, path: Path, what: str) -> UsageError:
    mark = node.start_mark
    return UsageError(what, where=f"{path}:{mark.line + 1}:{mark.column + 1}", next="write it out, without *")


def _syntax_error(error: yaml.MarkedYAMLError, path: Path) -> UsageError:
    mark = error.problem_mark or error.context_mark
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    parts = [part for part in (error.problem, error.context) if part]
    shown = (mark.get_snippet(indent=2, max_length=100) if mark else None) or ""
    hint = "indent with spaces, not tabs" if "'\\t'" in (error.problem or "") else ""
    if isinstance(error, _Misread):
        hint = "write the number that you mean, without a leading 0 and without ':'; text goes in quotes"
    what = (
        ("" if isinstance(error, _Misread) else "not valid YAML: ")
        + ", ".join(parts)
        + (f"\n{shown}" if shown else "")
    )
    return UsageError(what, where=where, next=hint)
