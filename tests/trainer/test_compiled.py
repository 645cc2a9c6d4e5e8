"""Which functions are compiled, and how often.

Run: python -m pytest tests/trainer/test_compiled.py
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from trainer.model import gpu_kernels
from trainer.model.compiled import where_it_pays
from trainer.model.drafter import Drafter
from trainer.model.flex import flex_mask
from trainer.model.gpu_kernels import Facts
from trainer.model.mask import bounds

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]
ON_A_GPU: Any = SimpleNamespace(is_cuda=True)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU that these stand in for can have kernels."""
    monkeypatch.setattr(gpu_kernels, "facts_here", Facts)


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_compiled_once_on_a_gpu_and_never_on_a_cpu() -> None:
    assert where_it_pays(double, torch.ones(1)) is double
    once, again = where_it_pays(double, ON_A_GPU), where_it_pays(double, ON_A_GPU)
    assert once is again and once is not double
    assert once._torchdynamo_orig_callable is double  # type: ignore[attr-defined]


def test_inside_a_larger_compiled_region_it_is_part_of_that() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def larger(x: Tensor) -> Tensor:
        return where_it_pays(double, ON_A_GPU)(x) + 1

    assert larger(torch.ones(2)).tolist() == [3.0, 3.0]
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_whole_drafter_under_a_block_mask_compiles_once(make_drafter: Callable[..., Drafter]) -> None:
    """Without a break, and not again for other anchors."""
    torch._dynamo.reset()
    drafter, counter = make_drafter(("sliding_attention", "full_attention")), CompileCounter()
    compiled = torch.compile(drafter, backend=counter, dynamic=False, fullgraph=True)
    starts = torch.zeros(1, 64, dtype=torch.int64)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        anchors = torch.randint(1, 60, (1, 32), generator=generator).sort(1).values
        keep = torch.arange(32)[None] < 20 + number
        masks = [
            flex_mask(bounds(anchors, keep, starts, 4, drafter.config.window(layer))) for layer in (0, 1)
        ]
        positions = (anchors[:, :, None] + torch.arange(4)).flatten(1)
        taps = torch.randn(1, 64, 96, generator=generator)
        context = drafter.context_keys_values(taps, torch.arange(64)[None])
        x = torch.randn(1, 128, 32, generator=generator)
        wanted = drafter(x, positions, context, masks)
        assert torch.allclose(compiled(x, positions, context, masks), wanted, atol=1e-5)
    assert counter.frame_count == 1
