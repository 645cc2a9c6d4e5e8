"""The published `speculators` package without what its model never calls.

Its imports of clients, data sets and a logger are answered with empty modules, so that
`pip install --no-deps speculators` is all that it needs. In CI its absence is a failure.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from unproven import did_not_run

NOT_NEEDED = ("datasets", "hs_connectors", "loguru", "openai")


class EmptyModules:
    """An importer that answers for the packages in NOT_NEEDED."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in NOT_NEEDED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def anything(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock()

        module.__getattr__ = anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def empty_modules() -> Iterator[None]:
    finder = EmptyModules()
    sys.meta_path.append(finder)  # last: a package that is really there is taken
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.split(".")[0] in NOT_NEEDED]:
            if isinstance(getattr(sys.modules[name].__spec__, "loader", None), EmptyModules):
                del sys.modules[name]


def load(*parts: str) -> Any:
    """The package, with the named modules of it imported."""
    if importlib.util.find_spec("speculators") is None:
        did_not_run("speculators is not installed: pip install --no-deps speculators==0.9.0")
    with empty_modules():
        for part in parts:
            importlib.import_module(f"speculators.{part}")
    return sys.modules["speculators"]
