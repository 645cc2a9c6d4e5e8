"""Tiny drafters and targets, and the slow drafter: they lie beside the oracles."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))

import pytest
from tiny_cases import qwen3
from torch import nn


@pytest.fixture(scope="session")
def target_model() -> nn.Module:
    return qwen3()


@pytest.fixture(scope="session")
def target_folder(target_model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target of the oracles on disk."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    target_model.save_pretrained(folder)  # type: ignore[operator]
    return folder
