"""Targets' folders with a tokenizer and a chat template, made here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for chat_kinds

from chat_kinds import save_chat_target


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a target of one kind: chat_target("qwen3")."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_chat_target(tmp_path_factory.mktemp("targets") / kind, kind)
        return made[kind]

    return make
