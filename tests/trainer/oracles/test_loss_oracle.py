"""The loss through the frozen head at 248,320 words, against plain autograd in double precision.

Run: python -m pytest tests/trainer/oracles/test_loss_oracle.py
"""

from __future__ import annotations

import math

import pytest
import torch
from slow_rules import dpace
from torch import Tensor

from trainer.training.loss import Kind, head_loss

WORDS, HIDDEN, BLOCKS, SLOTS = 248_320, 8, 2, 3
KINDS = {
    "cross-entropy": (Kind(), False),
    "cross-entropy, D-PACE": (Kind(dpace_alpha=0.5), False),
    "the target's labels, D-PACE": (Kind(dpace_alpha=0.25), True),
    "KL": (Kind(kl=True), True),
    "KL, D-PACE": (Kind(dpace_alpha=0.5, kl=True), True),
}


@pytest.fixture(scope="module")
def head() -> Tensor:
    return torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def case(head: Tensor, sharpness: float) -> dict[str, Tensor]:
    """Some slots foretell their label well, some badly, one has none."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(WORDS, (BLOCKS, SLOTS), generator=generator)
    noise = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, dtype=torch.float64)
    hidden = noise + sharpness * head[labels]
    supervised = torch.tensor([[True, True, True], [True, False, True]])
    weights = torch.tensor([1.0, 0.7, 0.5], dtype=torch.float64) * supervised
    return {
        "hidden": hidden,
        "labels": labels,
        "weights": weights,
        "supervised": supervised,
        "teacher": hidden.flip(0) * 0.7,
    }


def plain(c: dict[str, Tensor], head: Tensor, kind: Kind, taught: bool) -> tuple[float, float, Tensor]:
    """Loss, sum of weights, gradient of `hidden`: slot by slot, with all logits, by autograd."""
    hidden = c["hidden"].clone().requires_grad_()
    loss, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for block in range(BLOCKS):
        values, confidences = [], []
        for slot in range(SLOTS):
            said = torch.log_softmax(head @ hidden[block, slot], 0)
            label = int(c["labels"][block, slot])
            if taught:
                teacher = torch.log_softmax(head @ c["teacher"][block, slot], 0)
                label = int(teacher.argmax())
            values.append((teacher.exp() * (teacher - said)).sum() if taught and kind.kl else -said[label])
            confidences.append(math.exp(said[label].item()))
        weights = c["weights"][block].tolist()
        if kind.dpace_alpha is not None:
            weights = dpace(confidences, c["supervised"][block].tolist(), kind.dpace_alpha)
        for weight, value in zip(weights, values, strict=True):
            if weight:
                loss = loss + weight * value
                weight_sum += weight
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss.item(), weight_sum, gradient


def fast(
    c: dict[str, Tensor], head: Tensor, kind: Kind, taught: bool, dtype: torch.dtype, chunk: int | None = None
) -> tuple[float, float, Tensor]:
    hidden = c["hidden"].to(dtype).requires_grad_()
    teacher = c["teacher"].to(dtype) if taught else None
    sums = head_loss(hidden, head.to(dtype), c["labels"], c["weights"], c["supervised"], kind, teacher, chunk)
    (gradient,) = torch.autograd.grad(sums.loss, hidden)
    return sums.loss.item(), sums.weight.item(), gradient.double()


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("name", KINDS)
def test_double_precision_agrees_to_rounding(head: Tensor, name: str, chunk: int | None) -> None:
    kind, taught = KINDS[name]
    c = case(head, 1.5)
    wanted, got = plain(c, head, kind, taught), fast(c, head, kind, taught, torch.float64, chunk)
    assert got[0] == pytest.approx(wanted[0], rel=1e-12)
    assert got[1] == pytest.approx(wanted[1], rel=1e-12)
    assert (got[2] - wanted[2]).norm() / wanted[2].norm() < 1e-11
    assert wanted[0] > 0.1 and wanted[2].abs().max() > 0.01


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.08)])
def test_lower_precision_agrees_as_far_as_its_inputs_do(
    head: Tensor, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """The double precision side starts from the same rounded numbers, so the error is the loss's own."""
    kind, taught = KINDS[name]
    rounded = {k: v.to(dtype).double() if v.is_floating_point() else v for k, v in case(head, 1.0).items()}
    own_head = head.to(dtype).double()
    wanted, got = plain(rounded, own_head, kind, taught), fast(rounded, own_head, kind, taught, dtype)
    assert got[0] == pytest.approx(wanted[0], rel=tolerance)
    assert (got[2] - wanted[2]).norm() / wanted[2].norm() < tolerance


@pytest.mark.parametrize("sharpness", [0.0, 300.0])
@pytest.mark.parametrize("name", KINDS)
def test_hopeless_and_certain_slots_give_finite_numbers(head: Tensor, name: str, sharpness: float) -> None:
    """Logits in the thousands, probabilities of 0 and of 1."""
    kind, taught = KINDS[name]
    c = case(head, sharpness)
    c["hidden"] = torch.cat((c["hidden"][:1], 500 * c["hidden"][1:]))
    loss, weight, gradient = fast(c, head, kind, taught, torch.float32)
    assert math.isfinite(loss) and math.isfinite(weight) and loss >= -1e-3
    assert bool(gradient.isfinite().all())
