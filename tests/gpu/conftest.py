"""Tests that need an NVIDIA GPU which torch sees: `pytest -m gpu tests/gpu` on such a machine."""

from __future__ import annotations

import pytest


@pytest.fixture
def gpus() -> int:
    """How many there are. Without one the test says loudly that it did not run."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        pytest.skip("DID NOT RUN: torch sees no GPU here")
    return count
