"""The training pass and real decoding say the same of the same blocks, unless training lets through the
future.

Run: python -m pytest tests/trainer/eval/test_as_trained.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_bench import TAPS, bench
from tiny_models import VOCABULARY, random_model

from trainer.evaluation import as_trained
from trainer.evaluation.decode import speculate
from trainer.evaluation.evaluate_checkpoint import Evaluation
from trainer.evaluation.prompt_sets import given
from trainer.evaluation.proposers import BatchDrafter
from trainer.evaluation.sampling import Matching, greedy
from trainer.evaluation.tables import document, evaluation_report
from trainer.model.drafter import Drafter
from trainer.model.drafter_config import DrafterConfig
from trainer.model.mask import Bounds, bounds
from trainer.model.target import Target
from trainer.training import step


def prompts(rows: int = 4, size: int = 6) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, size), generator=torch.Generator().manual_seed(4))


def transparent_target() -> Target:
    """Its last layer passes on what it reads, so the next token can be read off tap 4."""
    model: Any = random_model("qwen3")
    last = model.model.layers[5]
    last.self_attn.o_proj.weight.data.zero_()
    last.mlp.down_proj.weight.data.zero_()
    return Target(model, TAPS)


def last_state_reader() -> Drafter:
    """A drafter that says what the last state of its context says: what a leak teaches.

    One head attends to the nearest position (keys and queries are constant, so RoPE alone decides); the
    block's own tokens have no values, the context's are the states of tap 4.
    """
    size = 32
    config = DrafterConfig(
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=size,
        vocab_size=VOCABULARY,
        block_size=4,
        num_target_layers=6,
        taps=TAPS,
        mask_token_id=1,
        layer_types=("full_attention",),
        attention_bias=True,
    )
    made = Drafter(config).eval()
    state = {name: torch.zeros_like(tensor) for name, tensor in made.state_dict().items()}
    identity, one = torch.eye(size), torch.ones(size)
    attention = "layers.0.self_attn."
    state["fc.weight"][:, 2 * size :] = identity
    for name in ("hidden_norm.weight", "norm.weight", "layers.0.post_attention_layernorm.weight"):
        state[name] = one
    for name in ("q", "k"):
        state[f"{attention}{name}_proj.bias"] = one
        state[f"{attention}{name}_norm.weight"] = 10**0.5 * one
    state[f"{attention}v_proj.weight"] = identity
    state[f"{attention}o_proj.weight"] = 1e4 * identity
    made.load_state_dict(state)
    return made


def leaky(*given: Any) -> Bounds:
    """The anchor's own state is in the context: the mistake that makes losses fine."""
    honest = bounds(*given)
    return dataclasses.replace(honest, high=honest.high + 1)


@pytest.mark.parametrize("layers", [("full_attention",) * 2, ("sliding_attention", "full_attention")])
def test_honest_training_agrees_block_by_block(
    layers: tuple[str, ...], make_drafter: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several passes, the last of which is not full."""
    monkeypatch.setattr(as_trained, "WIDTH", 8)
    target, drafter = Target(random_model("qwen3"), TAPS), make_drafter(layers)
    way = as_trained.training_step(drafter, target)
    outputs = speculate(target, BatchDrafter(drafter, target), prompts(), 24, Matching(greedy))
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert as_trained.right_slots(way, target, prompt, output) == output.accepted
    counts = [len(output.accepted) for output in outputs]
    assert any(count > 8 and count % 8 for count in counts)
    assert any(kept for output in outputs for kept in output.accepted)


@pytest.mark.parametrize("kind", ["qwen3-sliding", "qwen3.5"])
def test_on_targets_that_slide_or_recur_too(kind: str, make_drafter: Callable[..., Drafter]) -> None:
    target, drafter = Target(random_model(kind), TAPS), make_drafter()
    way = as_trained.training_step(drafter, target)
    outputs = speculate(target, BatchDrafter(drafter, target), prompts(1), 12, Matching(greedy))
    assert as_trained.right_slots(way, target, prompts()[0], outputs[0]) == outputs[0].accepted


def test_a_leak_shows_as_a_promise_that_decoding_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = transparent_target(), last_state_reader()
    tiny = given("tiny", prompts().tolist())
    honest = bench(target, drafter, sampled=False).measure(tiny)
    assert honest.disagreeing == 0
    monkeypatch.setattr(step, "bounds", leaky)
    result = bench(target, drafter, sampled=False).measure(tiny)
    real = result.runs["greedy"]["drafter"].acceptance_length
    assert real == honest.runs["greedy"]["drafter"].acceptance_length == honest.as_trained
    assert result.as_trained > real + 0.8  # the slot after the anchor is always right
    assert result.disagreeing > 0.7 * len(result.right)
    told = Evaluation("d", "t", "cpu", "float32", 4, False, *settings_of(drafter, target), [result])
    note = next(note for note in evaluation_report(told).notes if note.startswith("the training pass"))
    assert "trust the figures of decoding" in note
    assert document(told)["training_agrees"] is False and document(told)["lossless"] is True


def settings_of(drafter: Drafter, target: Target) -> tuple[Any, Any]:
    made = bench(target, drafter)
    return made.section, made.options
