"""The target's bench: how it reads whole rows up to its last tap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from trainer.bench import timing
from trainer.bench.measure import Settings, against_products, base
from trainer.bench.shapes import SHAPES
from trainer.bench.targets import causal_pairs, documents_of, make_target, target_products
from trainer.errors import TrainerError
from trainer.model.kernels import absent_kernels
from trainer.model.within import first_seen


def asked_of(settings: Settings) -> tuple[str, bool]:
    """Attention and compiling of the bench's target: as wished, else as a run would choose."""
    cuda = settings.where.type == "cuda"
    wish = settings.compile
    return settings.attention or ("flex" if cuda else "sdpa"), cuda if wish is None else wish


def bench_target(settings: Settings) -> dict[str, Any]:
    """The target's prefill up to its last tap.

    Raises:
        TrainerError: it cannot be run as wished, and another way's figures would mislead.
    """
    shape, device = SHAPES[settings.shape], settings.where
    target, prefill = make_target(shape, device), asked_of(settings)
    target.prefill.attention, target.prefill.compile = prefill
    layers = target.taps[-1] + 1
    size = (settings.rows, settings.row_tokens)
    tokens = torch.randint(1024, size, device=device)
    documents = documents_of(*size, settings.documents or 1).to(device)
    positions = torch.arange(settings.row_tokens, device=device) - first_seen(documents, None)
    single = settings.documents in (None, 1)
    step_rows = settings.micro_rows or settings.rows

    def whole() -> None:
        for start in range(0, settings.rows, step_rows):
            part = slice(start, start + step_rows)
            target.states(tokens[part], positions[part], documents[part], single=single)

    held = timing.reset_peak(device)
    whole()
    peak = timing.peak_gib(device)
    if not target.prefill.ready or (target.prefill.attention, target.prefill.compile) != prefill:
        raise TrainerError(
            f"attention {prefill[0]}, compile {prefill[1]} does not work here, see above",
            where="bench target",
            next="choose another way: --attention sdpa, --no-compile",
        )
    micro = settings.rows // step_rows
    made = [
        replace(product, times=micro * product.times)
        for product in target_products(shape, step_rows * settings.row_tokens, layers)
    ]
    seconds, alone = timing.in_turns(whole, made, target.dtype, device, settings.repeats)
    seen = causal_pairs(documents)
    attention = 4 * shape.target_heads * shape.head_size * seen * layers  # two products forward
    flop = sum(product.flop for product in made) + attention
    return {
        **base("target", settings),
        "attention": prefill[0],
        "compile": prefill[1],
        "documents": settings.documents or 1,
        "layers_run": layers,
        "pairs": seen,
        "ms": 1e3 * seconds,
        "tok_s": settings.context_tokens / seconds,
        **against_products(flop, seconds, alone, held, peak, settings),
        "absent_kernels": absent_kernels(),
        "formula": "2*M*K*N for q, k, v, o, gate, up, down of the layers up to the last tap; attention: "
        "4 * heads * head size for each pair of a token and one that it sees in its document; no head",
    }
