"""Kernel packages that linear-attention layers want on a GPU, and what is said where they are absent."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

PACKAGES = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}


def absent_kernels() -> list[str]:
    """The packages that cannot be imported here, by their names in the registry."""
    return [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]


def slow_for_want_of(absent: Sequence[str]) -> list[str]:
    """One line for each (known_failures.yaml: fla-missing knows them)."""
    return [
        f"WARNING: {name} kernels are not installed: without them a target's linear attention is at about "
        "half its speed"
        for name in absent
    ]
