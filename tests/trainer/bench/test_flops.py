"""The count of operations against a count by hand, and against what torch itself sees a step do.

Run: python -m pytest tests/trainer/bench
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer.bench.flops import Work, attention_flop, head_products, pairs, products
from trainer.bench.measure import Settings, make_step, work_of
from trainer.bench.shapes import SHAPES, Shape, batch_of
from trainer.bench.targets import make_target, target_products
from trainer.model.mask import bounds, dense_mask
from trainer.training.objective import draw

TOY = Settings("toy", context_tokens=128, row_tokens=32, anchors=24, device="cpu", repeats=1)


def test_the_count_of_a_small_step_by_hand() -> None:
    """Hidden 4, 1 layer, ffn 6, 2 query heads and 1 key head of 3, vocabulary 10, 2 taps, blocks of 2; one
    row of 8 tokens with 3 anchors.
    """
    shape = Shape(4, 1, 0, 8, 6, 2, 1, 3, 10, 2, 2, 4, 6, 2)
    made = {each.name: each.flop for each in products(shape, Work(1, 1, 8, 3, 1))}
    assert made == {
        "fc": 2 * (2 * 8 * 8 * 4),  # 8 tokens, 2 taps of 4 to 4; forward and weight gradient
        "context k, v": 2 * 3 * (2 * 8 * 4 * 3),
        "q": 3 * (2 * 6 * 4 * 6),  # 6 block tokens
        "k, v": 2 * 3 * (2 * 6 * 4 * 3),
        "o": 3 * (2 * 6 * 6 * 4),
        "gate, up": 2 * 3 * (2 * 6 * 4 * 6),
        "down": 3 * (2 * 6 * 6 * 4),
        "head": 2 * (2 * 3 * 4 * 10),  # one mask slot a block; forward and input gradient
    }
    # Anchors at 1, 3, 6: each of their blocks' 2 queries sees so much context and its block's 2 tokens.
    rule = bounds(
        torch.tensor([[1, 3, 6]]),
        torch.ones(1, 3, dtype=torch.bool),
        torch.zeros(1, 8, dtype=torch.int64),
        2,
        None,
    )
    assert pairs(rule) == 2 * (3 + 5 + 8)
    assert attention_flop(shape, [32]) == 12 * 2 * 3 * 32


@pytest.mark.parametrize("window", [None, 5])
def test_pairs_are_the_elements_of_the_mask(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(1, 40, (3, 6), generator=generator).sort(1).values
    keep = torch.rand(3, 6, generator=generator) < 0.7
    rule = bounds(anchors, keep, torch.zeros(3, 40, dtype=torch.int64), 4, window)
    assert pairs(rule) == int(dense_mask(rule).sum()) > 100


@pytest.mark.parametrize(
    "changes",
    [{}, {"anchors_per_pass": 4}, {"micro_rows": 2, "anchors_per_pass": 3}],
    ids=["whole", "passes", "micro"],
)
def test_the_count_is_what_torch_sees_a_step_do(changes: dict[str, int]) -> None:
    """But for attention: under a dense mask it computes every pair, which the count does not."""
    settings = dataclasses.replace(TOY, **changes)  # type: ignore[arg-type]
    shape, step = SHAPES["toy"], make_step(settings)
    step.compute_dtype, step.head = torch.float32, step.head.float()
    batch = batch_of(shape, 4, 32, torch.device("cpu"))
    uniform = draw((4, 32), 0, 0, 0)
    size = settings.micro_rows or 4
    with FlopCounterMode(display=False) as counter:
        for start in range(0, 4, size):
            part = slice(start, start + size)
            step.gradients(batch.part(part), [uniform[part]])
    queries = step.pass_width * shape.block
    dense = step.pass_count * 4 * queries * (32 + queries)
    wanted = sum(each.flop for each in products(shape, work_of(settings, step)))
    assert counter.get_total_flops() == wanted + attention_flop(shape, [dense] * shape.layers)


def test_heads_products_cover_all_tokens_in_chunks() -> None:
    shape = SHAPES["toy"]
    for tokens, chunk, cut in ((100, 30, (25, 4)), (90, 30, (30, 3)), (7, None, (7, 1)), (10, 4, (4, 3))):
        (made,) = head_products(shape, tokens, 3, chunk)
        assert (made.m, made.times) == (cut[0], 3 * cut[1])


def test_the_count_of_a_targets_prefill_is_what_torch_sees() -> None:
    shape = SHAPES["toy"]
    target = make_target(shape, torch.device("cpu"))
    tokens = torch.randint(1024, (2, 16))
    assert target.prefill.ready  # its first look, at a row of its own, is before
    with FlopCounterMode(display=False) as counter:
        target.states(tokens, torch.arange(16).expand(2, -1), torch.zeros_like(tokens))
    found = counter.get_flop_counts()["Global"]
    plain = sum(count for operation, count in found.items() if "attention" not in str(operation))
    assert plain == sum(each.flop for each in target_products(shape, 32, target.taps[-1] + 1))
