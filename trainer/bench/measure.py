"""The drafter's benches: step, loss, mask. Each gives one flat dictionary: what was run, and its figures.

share is the time of the work's own matrix products, run alone at their own shapes in the same process, over
the time of the work: what is left to win without computing something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from trainer import config as configs
from trainer.bench import timing
from trainer.bench.flops import (
    FORMULA,
    Work,
    attention_flop,
    head_products,
    pairs,
    products,
)
from trainer.bench.shapes import SHAPES, batch_of, drafter_of, ends_of
from trainer.machine import choose_device
from trainer.model.attention_spans import spans_of
from trainer.model.compiled import where_it_pays
from trainer.model.flex import flex_mask
from trainer.model.mask import bounds, dense_mask, mask_mod
from trainer.model.tiles import tile_map
from trainer.sections import Optimizer
from trainer.training.loss import Kind, chunk_tokens, head_loss
from trainer.training.objective import choose_anchors, draw
from trainer.training.optim import DrafterOptimizer
from trainer.training.step import DrafterStep


@dataclass(frozen=True)
class Settings:
    """What to bench; anchors are those of all rows together."""

    shape: str
    context_tokens: int
    row_tokens: int
    anchors: int
    anchors_per_pass: int | None = None  # of a row
    micro_rows: int | None = None
    execution: str = "eager"
    precision: str = "auto"
    device: str = "auto"
    repeats: int = 5
    attention: str | None = None  # of the target: sdpa | flex; None: as a run would
    compile: bool | None = None  # the target's layers; None: as a run would
    documents: int | None = None  # in each row that the target reads; None: one

    @property
    def rows(self) -> int:
        return self.context_tokens // self.row_tokens

    @property
    def width(self) -> int:
        return -(-self.anchors // self.rows)

    @property
    def where(self) -> torch.device:
        """Raises ConfigError: a GPU is asked for, and torch sees none."""
        return choose_device(self.device, "--device")


def problems(settings: Settings) -> list[str]:
    """What cannot be run, in words."""
    found = []
    if settings.context_tokens % settings.row_tokens:
        found.append(f"{settings.context_tokens} context tokens are no whole rows of {settings.row_tokens}")
    elif settings.micro_rows and settings.rows % settings.micro_rows:
        found.append(f"{settings.micro_rows} micro rows do not divide {settings.rows} rows")
    elif settings.width > settings.row_tokens - SHAPES[settings.shape].block:
        found.append(f"a row of {settings.row_tokens} tokens has no room for {settings.width} anchors")
    if (settings.documents or 1) > settings.row_tokens:
        found.append(f"a row of {settings.row_tokens} tokens cannot hold {settings.documents} documents")
    return found


def make_step(settings: Settings) -> DrafterStep:
    """The step of training, on random weights."""
    shape, device = SHAPES[settings.shape], settings.where
    config = configs.load(
        {
            "target": {"path": "none"},
            "drafter": {"mask_token_id": 0, "block_size": shape.block},
            "objective": {
                "anchors_per_document": settings.width,
                "anchors_per_pass": settings.anchors_per_pass,
                "gamma": 7.0,
            },
            "execution": settings.execution,
            "precision": settings.precision,
        }
    )
    drafter = drafter_of(shape, device).train()
    return DrafterStep(drafter, ends_of(shape, device), config, settings.width)


def work_of(settings: Settings, step: DrafterStep) -> Work:
    size = settings.micro_rows or settings.rows
    chunk = step.config.objective.loss_chunk
    if chunk is None:
        vocabulary = SHAPES[settings.shape].vocabulary
        chunk = chunk_tokens(settings.where, vocabulary, step.head.dtype, teacher=False)
    return Work(size, settings.rows // size, settings.row_tokens, step.pass_width, step.pass_count, chunk)


def base(what: str, settings: Settings) -> dict[str, Any]:
    """What was run, and where."""
    device = settings.where
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"bench": what, **asdict(settings), "device": name, "torch": torch.__version__}


def bench_step(settings: Settings) -> dict[str, Any]:
    """Forward, backward, clipping and update of one step, and its products alone."""
    shape, device, step = SHAPES[settings.shape], settings.where, make_step(settings)
    optimizer = DrafterOptimizer(step.drafter, Optimizer())
    batch = batch_of(shape, settings.rows, settings.row_tokens, device)
    uniform = draw((settings.rows, settings.row_tokens), 0, 0, 0).to(device)
    size = settings.micro_rows or settings.rows

    def whole() -> Tensor:
        weight = torch.zeros((), device=device)
        for start in range(0, settings.rows, size):
            part = slice(start, start + size)
            weight = weight + step.gradients(batch.part(part), [uniform[part]]).weight
        return optimizer.step(1.0, weight, step.execution.update)

    whole()  # moments and gradients are there now: what comes on top is the step's own
    held = timing.reset_peak(device)
    for _ in range(3):  # one captures the update
        whole()
    peak = timing.peak_gib(device)
    blocks = step.blocks(batch.rows, uniform)
    counts = [
        pairs(bounds(blocks.anchors, blocks.keep, batch.rows.doc_start, shape.block, window))
        for window in step.windows
    ]
    made = products(shape, work_of(settings, step))
    flop = sum(product.flop for product in made) + attention_flop(shape, counts)
    seconds, alone = timing.in_turns(whole, made, step.compute_dtype, device, settings.repeats)
    return {
        **base("step", settings),
        "ms": 1e3 * seconds,
        "context_tok_s": settings.context_tokens / seconds,
        "anchors_s": int(blocks.keep.sum()) / seconds,
        "tflop_attention": attention_flop(shape, counts) / 1e12,
        **against_products(flop, seconds, alone, held, peak, settings),
        "parameters": sum(each.numel() for each in step.drafter.parameters()),
        "formula": FORMULA,
    }


def against_products(
    flop: float, seconds: float, alone: float, held: float | None, peak: float | None, settings: Settings
) -> dict[str, Any]:
    """What every bench tells of a part beside its own matrix products.

    Args:
        flop: counted operations.
        seconds: of the part; alone: of its products by themselves.
        held: GiB before it, peak: GiB at most in it; None where that is not told.
    """
    return {
        "tflop": flop / 1e12,
        "tflop_s": flop / 1e12 / seconds,
        "products_ms": 1e3 * alone,
        "share": alone / seconds,
        "cubed_tflop_s": timing.cubed_tflops(settings.where, settings.repeats),
        "peak_gib": peak,
        "peak_beyond_state_gib": None if peak is None or held is None else peak - held,
    }


def bench_loss(settings: Settings) -> dict[str, Any]:
    """The frozen-head loss alone, forward and backward, of all mask slots."""
    shape, device = SHAPES[settings.shape], settings.where
    step = make_step(settings)
    blocks, slots = settings.rows * settings.width, shape.block - 1
    with device:
        hidden = torch.randn(blocks, slots, shape.hidden, dtype=step.compute_dtype, requires_grad=True)
        labels = torch.randint(shape.vocabulary, (blocks, slots))
        weights, alive = torch.rand(blocks, slots), torch.ones(blocks, slots, dtype=torch.bool)

    def whole() -> None:
        hidden.grad = None
        head_loss(hidden, step.head, labels, weights, alive, Kind()).loss.backward()

    held = timing.reset_peak(device)
    for _ in range(2):
        whole()
    peak = timing.peak_gib(device)
    made = head_products(shape, blocks * slots, 1, work_of(settings, step).loss_chunk)
    seconds, alone = timing.in_turns(whole, made, step.compute_dtype, device, settings.repeats)
    flop = sum(product.flop for product in made)
    return {
        **base("loss", settings),
        "rows_of_logits": blocks * slots,
        "vocabulary": shape.vocabulary,
        "ms": 1e3 * seconds,
        **against_products(flop, seconds, alone, held, peak, settings),
        "formula": "2*M*K*N for hidden times head and its gradient times head, chunk by chunk",
    }


def bench_mask(settings: Settings) -> dict[str, Any]:
    """What our kernels walk over and flex attention's tiles, both by arithmetic, beside torch's own block
    mask, which asks about every element, and the dense one.
    """
    shape, device = SHAPES[settings.shape], settings.where
    batch = batch_of(shape, settings.rows, settings.row_tokens, device)
    uniform = draw((settings.rows, settings.row_tokens), 0, 0, 0).to(device)
    anchors, keep = choose_anchors(batch.rows, uniform, settings.width, settings.width)
    queries = settings.width * shape.block
    keys = settings.row_tokens + queries
    found: dict[str, Any] = {**base("mask", settings), "queries_a_row": queries, "keys_a_row": keys}
    for name, window in (("full", None), ("sliding", shape.window)):
        rule = bounds(anchors, keep, batch.rows.doc_start, shape.block, window)
        create = partial(where_it_pays(create_block_mask, anchors), mask_mod(rule), settings.rows, None)
        ways: dict[str, Callable[[], object]] = {
            "spans": partial(spans_of, rule, shape.heads // shape.key_value_heads),
            "tiles": partial(flex_mask, rule),
            "torch": partial(create, queries, keys, device=device.type),
        }
        if settings.rows * queries * keys <= 1 << 31:
            ways["dense"] = partial(dense_mask, rule)
        for way, make in ways.items():
            found[f"{name}_{way}_ms"] = 1e3 * timing.timed(make, device, settings.repeats, warmup=2)
        partly, whole = tile_map(rule)
        found[f"{name}_tiles_asked"], found[f"{name}_tiles_whole"] = int(partly.sum()), int(whole.sum())
        found[f"{name}_tiles_of"] = partly.numel()
        found[f"{name}_pairs"] = pairs(rule)
    return found
