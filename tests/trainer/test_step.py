"""A step must give the same loss and gradients however its batch is cut, packed, or spread over ranks.

Run: python -m pytest tests/trainer/test_step.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from torch import Tensor

from trainer import config as configs
from trainer.data.anchors import needed_width
from trainer.data.batch import Batch, without_bad_rows
from trainer.data.packing import Document, Rows, pack
from trainer.model.drafter import Drafter
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.sections import TrainConfig
from trainer.training.loss import Kind, Sums, head_loss
from trainer.training.objective import draw
from trainer.training.step import DrafterStep

PER_DOCUMENT = 100  # more than any document has: all valid anchors, whatever is drawn


def settings(**objective: Any) -> TrainConfig:
    gamma = None if objective.get("weighting") == "dpace" else 3.0
    section: dict[str, Any] = {
        "target": {"path": "unused"},
        "drafter": {"mask_token_id": 1, "block_size": 4},
        "objective": {"anchors_per_document": PER_DOCUMENT, "gamma": gamma, **objective},
        "precision": "float32",
    }
    return configs.load(section)


def documents(sizes: tuple[int, ...] = (14, 9, 11, 5)) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for size in sizes:
        tokens = torch.randint(2, VOCABULARY, (size,), generator=generator).tolist()
        made.append(Document(tokens, [place >= 2 for place in range(size)]))
    return made


def states_of(target: Target, rows: Rows) -> States:
    return target.states(rows.tokens, rows.positions, rows.documents, full=True)


def sums_and_gradients(
    drafter: Drafter,
    target: Target,
    config: TrainConfig,
    rows: Rows,
    pieces: list[Any],
    seed: int = 0,
) -> tuple[Sums, dict[str, Tensor]]:
    """Loss sums and gradients of `rows`, computed in the given pieces (indices of rows), gradients added."""
    drafter.zero_grad()
    width = needed_width(rows, config.objective.anchors_per_document)
    step = DrafterStep(drafter, target, config, width)
    uniform = draw((len(rows), rows.tokens.shape[1]), seed, 0, 0)
    total: Sums | None = None
    for piece in pieces:
        sums = step.sums(Batch(rows[piece], states_of(target, rows[piece])), uniform[piece])
        sums.loss.backward()
        total = sums if total is None else total + sums
    assert total is not None
    gradients = {
        name: parameter.grad.clone() / total.weight
        for name, parameter in drafter.named_parameters()
        if parameter.grad is not None
    }
    assert len(gradients) == len(list(drafter.parameters()))
    return total, gradients


def assert_same(one: tuple[Sums, dict[str, Tensor]], other: tuple[Sums, dict[str, Tensor]]) -> None:
    for name in ("loss", "weight", "correct", "counted", "prefix", "blocks"):
        assert torch.allclose(getattr(one[0], name), getattr(other[0], name), rtol=1e-4), name
    for name, gradient in one[1].items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert (gradient - other[1][name]).abs().max() / scale < 1e-3, name


LAYERS = [("full_attention",) * 2, ("sliding_attention", "full_attention")]


@pytest.mark.parametrize("labels", ["data", "kl"])
@pytest.mark.parametrize("layers", LAYERS)
def test_packing_documents_together_changes_nothing(
    make_drafter: Callable[..., Drafter], make_target: Callable[..., Target], layers: Any, labels: str
) -> None:
    """Four documents in rows of their own, in two packed rows, and in one: the same loss and gradients."""
    drafter, target, config = make_drafter(layers), make_target(), settings(labels=labels)
    made = documents()
    alone = [pack([document], 14) for document in made]
    apart = Rows(*(torch.cat(parts) for parts in zip(*(rows.parts() for rows in alone), strict=True)))
    two, one = pack(made, 25), pack(made, 40)
    assert (len(apart), len(two), len(one)) == (4, 2, 1)
    results = [sums_and_gradients(drafter, target, config, rows, [slice(None)]) for rows in (apart, two, one)]
    assert results[0][0].weight > 20
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layers", LAYERS)
def test_flex_and_dense_attention_train_the_same(
    make_drafter: Callable[..., Drafter],
    make_target: Callable[..., Target],
    layers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On rows of several tiles with dead blocks, through all layers."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    drafter, target, config = make_drafter(layers), make_target(), settings()
    rows = pack(documents((90, 50, 30, 60, 12)), 140)
    assert len(rows) == 2
    dense, flex = (
        sums_and_gradients(
            drafter, target, dataclasses.replace(config, attention=attention), rows, [slice(None)]
        )
        for attention in ("dense", "flex")
    )
    assert dense[0].weight > 100
    assert_same(dense, flex)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_micro_batches_and_ranks_add_up_to_the_whole_batch(
    make_drafter: Callable[..., Drafter], make_target: Callable[..., Target], weighting: str
) -> None:
    """The pieces hold very different weight; dividing by the sum of all makes them add up."""
    drafter, target = make_drafter(), make_target()
    config = settings(weighting=weighting, anchors_per_document=3)
    rows = pack(documents((24, 24, 20, 3, 3, 24)), 24)
    whole = sums_and_gradients(drafter, target, config, rows, [slice(None)])
    assert_same(whole, sums_and_gradients(drafter, target, config, rows, [slice(0, 1), slice(1, None)]))
    ranks = [torch.tensor([0, 2]), torch.tensor([1, 3, 4])]
    assert_same(whole, sums_and_gradients(drafter, target, config, rows, ranks))
    small = settings(weighting=weighting, anchors_per_document=3, loss_chunk=5)
    assert_same(whole, sums_and_gradients(drafter, target, small, rows, [slice(None)]))


def test_a_row_of_nan_states_is_taken_out_and_changes_nothing_else(
    make_drafter: Callable[..., Drafter], make_target: Callable[..., Target]
) -> None:
    drafter, target, config = make_drafter(), make_target(), settings()
    rows = pack(documents((24, 24, 24)), 24)
    states = states_of(target, rows)
    states.taps[1, 5, 7] = float("nan")
    batch, bad = without_bad_rows(rows, states)
    assert bad.tolist() == [False, True, False]
    step = DrafterStep(drafter, target, config, 24)
    uniform = draw((3, 24), 0, 0, 0)
    sums = step.sums(batch, uniform)
    sums.loss.backward()
    others = torch.tensor([0, 2])
    wanted = step.sums(Batch(rows[others], states_of(target, rows[others])), uniform[others])
    assert torch.allclose(sums.loss, wanted.loss) and torch.allclose(sums.weight, wanted.weight)
    for parameter in drafter.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())


def test_labels_of_the_target_come_from_the_state_one_token_earlier(
    make_drafter: Callable[..., Drafter], make_target: Callable[..., Target]
) -> None:
    drafter, target, config = make_drafter(), make_target("llama"), settings(labels="target")
    rows = pack(documents(), 25)
    states = states_of(target, rows)
    assert states.final is not None
    said = target.logits(states.final).argmax(-1)  # [R, S] what the target says comes after each token
    assert len(set(said.flatten().tolist())) > 5
    batch, uniform = Batch(rows, states), draw((len(rows), 25), 0, 0, 0)
    step = DrafterStep(drafter, target, config, needed_width(rows, PER_DOCUMENT))
    blocks = step.blocks(rows, uniform)
    labels = torch.zeros_like(blocks.labels)
    for row, block, slot in blocks.supervised.nonzero().tolist():
        anchor = int(blocks.anchors[row, block])
        labels[row, block, slot] = said[
            row, anchor + slot
        ]  # slot holds slot 1 at 0: after anchor + slot + 1 - 1
    wanted = head_loss(
        step.hidden(batch, blocks),
        target.head_weight,
        labels.flatten(0, 1),
        blocks.weights.flatten(0, 1),
        blocks.supervised.flatten(0, 1),
        Kind(),
    )
    got = step.sums(batch, uniform)
    assert torch.allclose(got.loss, wanted.loss, rtol=1e-5) and torch.equal(got.correct, wanted.correct)
    data = DrafterStep(drafter, target, settings(labels="data"), step.width).sums(batch, uniform)
    assert not torch.allclose(got.loss, data.loss, rtol=1e-2)


def test_input_noise_is_bounded_and_only_for_training(
    make_drafter: Callable[..., Drafter], make_target: Callable[..., Target]
) -> None:
    drafter, target, config = make_drafter(), make_target(), settings(input_noise=0.05)
    rows = pack(documents(), 40)
    seen: list[Tensor] = []
    drafter.fc.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    batch = Batch(rows, states_of(target, rows))
    for training in (True, False):
        drafter.train(training)
        DrafterStep(drafter, target, config, 8).sums(batch, draw((1, 40), 0, 0, 0))
    off = (seen[0] - batch.states.taps).abs()
    assert 0.04 < off.max() <= 0.0501 and torch.equal(seen[1], batch.states.taps)


def test_bfloat16_products_stay_close_to_float32(
    make_drafter: Callable[..., Drafter], make_target: Callable[..., Target]
) -> None:
    drafter, target, config = make_drafter(), make_target(), settings()
    rows = pack(documents(), 25)
    exact = sums_and_gradients(drafter, target, config, rows, [slice(None)])
    rounded = sums_and_gradients(
        drafter, target, dataclasses.replace(config, precision="bfloat16"), rows, [slice(None)]
    )
    assert torch.allclose(exact[0].loss, rounded[0].loss, rtol=0.05)
    assert torch.equal(exact[0].weight, rounded[0].weight)
    for name in ("fc.weight", "layers.1.mlp.down_proj.weight"):
        one, other = exact[1][name].flatten(), rounded[1][name].flatten()
        assert torch.nn.functional.cosine_similarity(one, other, 0) > 0.98
