"""Fixtures of the trainer's tests. One core is enough for all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: test workers share the cores

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for tiny_models

from tiny_models import KINDS, VOCABULARY, random_model, save_target

from trainer.model.drafter import Drafter
from trainer.model.drafter_config import DrafterConfig
from trainer.model.target import Target

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> Iterator[None]:
    """What asks for as many threads as there are cores gets one: of a tiny model's threads each waits longer
    for the others, on cores that other tests use, than it computes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("trainer.evaluation.evaluate_checkpoint", "trainer.run.setup"):
            patch.setattr(f"{module}.usable_cores", lambda: 1)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A run or a command sets the number of threads for its whole process."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def make_target() -> Callable[..., Target]:
    """A Target with random weights: make_target(kind, taps)."""

    def make(kind: str = "qwen3", taps: tuple[int, ...] = (0, 2, 4), seed: int = 0) -> Target:
        return Target(random_model(kind, seed), taps)

    return make


@pytest.fixture
def make_drafter() -> Callable[..., Drafter]:
    """A Drafter with large random weights, so that a wrong mask or position changes its output visibly."""

    def make(
        layer_types: tuple[str, ...] = ("full_attention",) * 2, seed: int = 0, **changes: Any
    ) -> Drafter:
        values: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": len(layer_types),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": VOCABULARY,
            "block_size": 4,
            "num_target_layers": 6,
            "taps": (0, 2, 4),
            "mask_token_id": 1,
            "layer_types": layer_types,
            "sliding_window": 6 if "sliding_attention" in layer_types else None,
        }
        drafter = Drafter(DrafterConfig(**{**values, **changes})).eval()
        generator = torch.Generator().manual_seed(seed)
        for parameter in drafter.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
        return drafter

    return make


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved_target(tmp_path: Path) -> Path:
    """A tiny Qwen3 target on disk with a byte tokenizer, as a recipe names it."""
    return save_target(tmp_path / "target")
