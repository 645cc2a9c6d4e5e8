"""Compile our Triton kernels for an H100 or H200, and those of attention for cards with less shared memory,
which needs no GPU, at the sizes of real runs.

Prints one JSON object: bytes of shared memory by kernel.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer.model import (
    accumulate,
    accumulate_kernel,
    attention_kernel,
    block_attention,
    norm_rope,
    norm_rope_kernel,
)
from trainer.model import attention_spans as spans
from trainer.training import adamw, adamw_kernel, errors_kernel

HOPPER, ADA = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 89, 32)
ADA_BYTES = 99 * 1024  # of shared memory that a program gets
WIDE = {
    "logs",
    "dots",
    "weight",
    "cos",
    "sin",
    "parts",
    "losses",
    "scales",
    "gradient",
    "first",
    "second",
    "total",
}
WIDE |= {"rate", "count", "divisor", "bad"}
NUMBERS = {"scale", "factor", "eps", "rest1", "rest2", "log2_beta1", "log2_beta2", "decay"}
WHOLE = {"queries", "tokens", "keys", "rows", "elements", "words", "stride"}
INDICES = {"low": "*i32", "high": "*i32", "spans": "*i32", "labels": "*i64", "right": "*i1"}


def shared(
    kernel: Any, constants: dict[str, Any], warps: int, stages: int = 3, target: GPUTarget = HOPPER
) -> int:
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in NUMBERS:
            signature[name] = "fp32"
        elif name in WHOLE:
            signature[name] = "i32"
        else:
            signature[name] = INDICES.get(name) or ("*fp32" if name in WIDE else "*bf16")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if name not in constants and name not in NUMBERS
    }
    source = ASTSource(kernel, signature, constexprs=places, attrs=aligned)
    made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    return int(made.metadata.shared)


def attention(kernel: Any, tiles: spans.Tiles, own: int | bool, shared_bytes: int | None = None) -> int:
    stages = block_attention.stages_of(tiles, shared_bytes)
    sizes = {"HEADS": 32, "GROUPS": 8, "SIZE": 128, "PACK": 4, "BLOCK": 16, "CAUSAL": False}
    return shared(
        kernel,
        {**sizes, "ROWS": tiles.rows, "KEYS": tiles.keys, "OWN": own},
        tiles.warps,
        stages,
        HOPPER if shared_bytes is None else ADA,
    )


if __name__ == "__main__":
    heads = {"HEADS": 32, "SIZE": 128, "ROWS": norm_rope.ROWS}
    found = {
        "forward": attention(attention_kernel.forward, spans.FORWARD, spans.FORWARD.own),
        "query_gradients": attention(attention_kernel.query_gradients, spans.QUERIES, spans.QUERIES.own),
        "key_gradients": attention(attention_kernel.key_gradients, spans.KEYS, False),
        "forward, Ada": attention(attention_kernel.forward, spans.FORWARD, spans.FORWARD.own, ADA_BYTES),
        "query_gradients, Ada": attention(
            attention_kernel.query_gradients, spans.QUERIES, spans.QUERIES.own, ADA_BYTES
        ),
        "key_gradients, Ada": attention(attention_kernel.key_gradients, spans.KEYS, False, ADA_BYTES),
        "norm and RoPE": shared(norm_rope_kernel.forward, heads, norm_rope.WARPS),
        "norm and RoPE back": shared(norm_rope_kernel.gradients, heads, norm_rope.WARPS),
        "errors": shared(
            errors_kernel._errors,
            {"COLUMNS": errors_kernel.COLUMNS, "DEEP": errors_kernel.DEEP},
            errors_kernel.WARPS,
        ),
        "update": shared(adamw_kernel.update, {"BLOCK": adamw.BLOCK, "TWIN": True}, adamw.WARPS),
        "add": shared(accumulate_kernel.add, {"BLOCK": accumulate.BLOCK, "FIRST": False}, 4),
    }
    print(json.dumps(found))
