"""Tests that need an NVIDIA GPU which torch sees: `pytest -m gpu tests/gpu` on such a machine.

With several workers (`-n`) leave test_probe.py to a run of its own: `probe` takes free GPUs only.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Probes first: once another test has used a GPU, this process holds it."""
    items.sort(key=lambda item: item.path.name != "test_probe.py")


@pytest.fixture
def gpus() -> int:
    """How many there are. Without one the test says loudly that it did not run."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        pytest.skip("DID NOT RUN: torch sees no GPU here")
    return count
