"""How far a target can read, and what a run says of rows and tokens that do not suit it.

Run: python -m pytest tests/trainer/test_positions.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_target

from trainer import config as configs
from trainer.model.positions import positions
from trainer.run.setup import assemble


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 40960}, 40960),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default"}}, 40960),
        # The length before it is stretched, and the one after it: both are found.
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "full_attention": {"factor": 64.0, "original_max_position_embeddings": 4096},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            262144,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": "none"}, 64),
    ],
)
def test_positions(config: dict[str, Any], wanted: int | None) -> None:
    assert positions(config) == wanted


def test_a_run_says_when_its_mask_token_ends_texts(tmp_path: Path) -> None:
    section: dict[str, Any] = {
        "target": {"path": str(save_target(tmp_path / "target"))},  # whose texts end with id 0
        "device": "cpu",
        "threads": 1,
        "objective": {"gamma": 3.0},
    }
    for token, warned in (("<|endoftext|>", 1), ("<|mask|>", 0)):
        said: list[str] = []
        drafter = {"layers": 1, "block_size": 4, "taps": [0], "mask_token": token}
        assemble(configs.load({**section, "drafter": drafter}), said.append)
        found = [line for line in said if line.startswith("WARNING")]
        assert len(found) == warned and all("mask token (id 0)" in line for line in found)


def test_a_run_says_when_its_rows_are_longer_than_the_target_can_read(tmp_path: Path) -> None:
    section: dict[str, Any] = {
        "target": {"path": str(save_target(tmp_path / "target"))},  # 512 positions
        "device": "cpu",
        "threads": 1,
        "drafter": {"layers": 1, "block_size": 4, "taps": [0], "mask_token_id": 1},
        "objective": {"gamma": 3.0},
    }
    for row_tokens, warned in ((512, 0), (513, 1)):
        said: list[str] = []
        data = {"row_tokens": row_tokens}
        assemble(configs.load({**section, "data": data}), said.append)
        found = [line for line in said if line.startswith("WARNING")]
        assert len(found) == warned
        assert all("513 tokens" in line and "max_position_embeddings 512" in line for line in found)
