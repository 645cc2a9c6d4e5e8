"""What the attention kernels walk over is what the rule says, element by element, forward and backward.

Run: python -m pytest tests/trainer/test_attention_spans.py
"""

from __future__ import annotations

import pytest
import torch

from trainer import config as configs
from trainer.bench.shapes import SHAPES, batch_of, drafter_of, ends_of
from trainer.errors import ConfigError
from trainer.model import attention_spans as spans
from trainer.model import gpu_kernels
from trainer.model.attention_spans import Tiles
from trainer.model.gpu_kernels import Facts
from trainer.model.mask import Bounds, bounds, dense_mask
from trainer.training.objective import draw
from trainer.training.step import DrafterStep, attention_of


def rule_of(
    seed: int, tokens: int, count: int, block: int, window: int | None, documents: int, dead: float
) -> Bounds:
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.stack([torch.randperm(tokens, generator=generator)[:count].sort().values for _ in "abc"])
    keep = torch.rand(anchors.shape, generator=generator) >= dead
    starts = torch.zeros(3, tokens, dtype=torch.int64)
    for row in range(3):
        for start in torch.randperm(tokens, generator=generator)[:documents].sort().values.tolist():
            starts[row, start:] = start
    return bounds(torch.where(keep, anchors, 0), keep, starts, block, window)


@pytest.mark.parametrize("tiles", [(16, 16, 16), (64, 32, 16), (16, 64, 32)])
@pytest.mark.parametrize("share", [1, 3, 4])
@pytest.mark.parametrize(
    ("tokens", "count", "block", "window", "documents", "dead"),
    [
        (200, 20, 4, None, 0, 0.0),
        (200, 20, 4, None, 4, 0.2),
        (150, 30, 7, 40, 3, 0.1),
        (130, 9, 16, 5, 1, 0.5),
        (64, 60, 1, None, 9, 0.0),
        (33, 5, 3, None, 0, 1.0),
    ],
)
def test_they_see_what_the_rule_says(
    monkeypatch: pytest.MonkeyPatch,
    tiles: tuple[int, int, int],
    share: int,
    tokens: int,
    count: int,
    block: int,
    window: int | None,
    documents: int,
    dead: float,
) -> None:
    for name, rows in zip(("FORWARD", "QUERIES", "KEYS"), tiles, strict=True):
        monkeypatch.setattr(spans, name, Tiles(rows, tiles[0], 16, 4, 1))
    rule = rule_of(count, tokens, count, block, window, documents, dead)
    made, wanted = spans.spans_of(rule, share), dense_mask(rule)[:, 0]
    for row in range(3):
        ways = spans.seen_by_kernels(made, row, range(count * block))
        assert len(ways) == 3 and all(torch.equal(way, wanted[row]) for way in ways)


def test_little_is_compared_with_the_rule() -> None:
    """Of a long document all tiles but one or two at an anchor are read without a question, in both ways."""
    rule = rule_of(0, 4096, 64, 16, None, 0, 0.0)
    made = spans.spans_of(rule, 4)
    for of, unit in ((made.forward, spans.FORWARD.keys), (made.queries, spans.QUERIES.keys)):
        first, whole, rest, last = of.double().unbind(-1)
        assert float((last - first - (rest - whole).clamp(min=0)).mean()) < 4096 / 64 + unit
    first, whole, rest, last = made.keys.double().unbind(-1)
    asked, all_of_them = (last - first - (rest - whole)).sum(), (last - first).sum()
    assert asked < 0.1 * all_of_them
    assert (
        float(all_of_them) < 0.6 * made.keys.shape[1] * 64 * 3
    )  # an anchor reads half of the row, on average


@pytest.mark.parametrize("dead", [0.0, 1.0])
def test_a_wrong_span_is_seen(dead: float) -> None:
    """The check that every run makes before its first step would find a tile that is left out or asked for
    nothing.
    """
    rule = rule_of(0, 300, 20, 4, None, 2, dead)
    made, wanted = spans.spans_of(rule, 1), dense_mask(rule)[:, 0]
    for name in ("forward", "queries", "keys"):
        tensor = getattr(made, name)
        before = tensor.clone()
        for harm in (torch.zeros_like(before), torch.tensor([0, 0, 999, 999]).expand_as(before)):
            tensor.copy_(harm)
            seen = torch.stack([spans.seen_by_kernels(made, row, range(80)) for row in range(3)], 1)
            assert torch.equal(seen, wanted.expand_as(seen)) is (dead == 1.0)
        tensor.copy_(before)


def test_the_kernels_are_for_gpus_and_narrow_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "facts_here", Facts)
    shape = drafter_of(SHAPES["small"], torch.device("cpu")).config
    assert attention_of("auto", "cpu", torch.bfloat16, shape) == "dense"
    assert attention_of("auto", "cuda", torch.bfloat16, shape) == "triton"
    assert attention_of("auto", "cuda", torch.float32, shape) == "flex"
    assert attention_of("flex", "cuda", torch.bfloat16, shape) == "flex"
    with pytest.raises(ConfigError, match="our kernels need a CUDA GPU, this runs on cpu"):
        attention_of("triton", "cpu", torch.bfloat16, shape)
    with pytest.raises(ConfigError, match="our kernels multiply 16-bit numbers, not float32"):
        attention_of("triton", "cuda", torch.float32, shape)


def test_a_step_gives_layers_of_one_window_one_mask() -> None:
    shape = SHAPES["toy"]
    section = {"target": {"path": "none"}, "drafter": {"mask_token_id": 0}}
    step = DrafterStep(
        drafter_of(shape, torch.device("cpu")), ends_of(shape, torch.device("cpu")), configs.load(section), 6
    )
    step.attention = "triton"
    batch = batch_of(shape, 2, 32, torch.device("cpu"))
    blocks = step.blocks(batch.rows, draw((2, 32), 0, 0, 0))
    sliding, full = step.masks(batch.rows, blocks)
    assert sliding.causal and not full.causal and sliding.pack == full.pack == 2
    assert torch.equal(sliding.high, full.high) and not torch.equal(sliding.low, full.low)
