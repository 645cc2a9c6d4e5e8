"""Run on a machine with a GPU: pytest -m gpu tests/gpu/test_target_prefill.py. The target's packed rows by
compiled flex attention and compiled layers: what the documents give one by one, without waiting for the
device once, and never compiled again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config

from trainer.bench.targets import documents_of
from trainer.model.target import Target
from trainer.model.within import first_seen

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 200,
}
HALVES = ["sliding_attention", "full_attention"] * 3
KINDS: dict[str, Any] = {
    "full": lambda: Qwen3Config(**SIZES),
    "sliding": lambda: Qwen3Config(**SIZES, use_sliding_window=True, layer_types=HALVES),
    "capped": lambda: Gemma2Config(**SIZES, final_logit_softcapping=None, attn_logit_softcapping=20.0),
}


def target_of(kind: str, compiles: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Target, list[str]]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        way = "eager" if kind == "capped" else "sdpa"
        model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=dtype, attn_implementation=way)
    target, said = Target(model, (0, 2, 4)), list[str]()
    target.prefill.compile, target.prefill.say = compiles, said.append
    assert target.prefill.attention == "flex"
    return target, said


def packed(number: int, size: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows of five documents; not a whole number of tiles."""
    documents = documents_of(3, size, 5, number).cuda()
    positions = torch.arange(size, device="cuda") - first_seen(documents, None)
    return torch.randint(1024, (3, size), device="cuda"), positions, documents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_give_what_their_documents_give(
    gpus: int, kind: str, compiles: bool, dtype: torch.dtype
) -> None:
    target, said = target_of(kind, compiles, dtype)
    for number in range(2):
        rows = packed(number)
        found, wanted = target.states(*rows, full=True), target.one_document_at_a_time(*rows, True)
        assert found.final is not None and wanted.final is not None
        for mine, theirs in ((found.taps, wanted.taps), (found.final, wanted.final)):
            error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
            assert error < (2e-3 if dtype == torch.float32 else 0.03)  # TensorFloat-32 where it is let
    assert not any("WARNING" in line for line in said), said
    assert target.prefill.compile == compiles and target.prefill.attention == "flex"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiles", [False, True])
def test_reading_neither_waits_for_the_device_nor_compiles_again(
    gpus: int, kind: str, compiles: bool
) -> None:
    target, said = target_of(kind, compiles)
    several = [packed(number) for number in range(4)]
    tokens = several[0][0]
    one = tokens, torch.arange(1000, device="cuda").expand(3, -1), torch.zeros_like(tokens)
    for _ in range(2):
        target.states(*several[0])
        target.states(*one, single=True)
    torch.cuda.synchronize()
    compiled = counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rows in several:
            target.states(*rows)
        target.states(*one, single=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counters["stats"]["unique_graphs"] == compiled
    assert not any("WARNING" in line for line in said), said
