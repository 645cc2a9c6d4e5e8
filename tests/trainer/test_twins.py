"""Matrices cast once a step give what autocast gives, which casts them for every pass.

Run: python -m pytest tests/trainer/test_twins.py
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from test_passes import Case, Makers
from test_passes import makers as makers
from test_step import LAYERS, documents
from torch import nn

from trainer.data.packing import pack
from trainer.sections import Optimizer, ParameterGroup
from trainer.training.optim import DrafterOptimizer
from trainer.training.twins import Twins


def bfloat16_case(makers: Makers, **objective: Any) -> Case:
    case = Case(makers, LAYERS[1], pack(documents(), 40), **objective)
    case.drafter.float()
    case.step.compute_dtype, case.step.head = torch.bfloat16, case.step.head.bfloat16()
    return case


def assert_near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] - other[name]).norm() <= 1e-5 * one[name].norm(), name


def test_a_pass_with_twins_is_a_pass_under_autocast(makers: Makers) -> None:
    case = bfloat16_case(makers)
    for _ in range(2):  # the second time with other weights: twins follow their masters
        _, wanted = case.plain(case.uniforms(1))
        _, found = case.found(lambda: case.step.gradients(case.batch, case.uniforms(1)))
        assert_near(wanted, found)
        with torch.no_grad():
            for parameter in case.drafter.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_the_next_pass_multiplies_by_what_the_optimizer_wrote(algorithm: Literal["adamw", "muon"]) -> None:
    """torch's fused update on the CPU does not count in a weight's version."""
    linear = nn.Linear(4, 4)
    groups = [ParameterGroup("m", ["weight"], algorithm=algorithm), ParameterGroup("b", ["bias"])]
    twins, optimizer = Twins(linear, torch.bfloat16), DrafterOptimizer(linear, Optimizer(0.1, groups=groups))
    for _ in range(2):
        before = linear.weight.detach().clone()
        for parameter in linear.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(1.0, torch.tensor(1.0))
        assert not torch.equal(linear.weight, before)
        with twins.standing_in():
            used = linear.weight.detach().clone()
        assert used.dtype == torch.bfloat16 and torch.equal(used, linear.weight.bfloat16())


def test_gradients_are_the_masters_and_float32(makers: Makers) -> None:
    case = bfloat16_case(makers, anchors_per_pass=2)
    masters = dict(case.drafter.named_parameters())
    case.step.gradients(case.batch, case.uniforms(1))
    after = dict(case.drafter.named_parameters())
    assert list(after) == list(masters) and all(after[name] is masters[name] for name in masters)
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in masters.values())
    before = {name: each.grad.clone() for name, each in masters.items() if each.grad is not None}
    case.step.gradients(case.batch, case.uniforms(1))  # a second micro-batch adds to the first
    twice = {name: 2 * gradient for name, gradient in before.items()}
    assert_near(twice, {name: each.grad for name, each in masters.items() if each.grad is not None})


def test_masters_come_back_after_a_fault() -> None:
    linear = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    weight, twins = linear[0].weight, Twins(linear, torch.bfloat16)
    with pytest.raises(KeyError), twins.standing_in():
        assert linear[0].weight.dtype == linear[0].bias.dtype == torch.bfloat16
        assert linear[1].weight.dtype == torch.float32
        raise KeyError
    assert linear[0].weight is weight


def test_there_are_none_where_products_have_the_weights_dtype() -> None:
    linear = nn.Linear(4, 4)
    weight, twins = linear.weight, Twins(linear, torch.float32)
    with twins.standing_in():
        assert linear.weight is weight
        linear(torch.ones(4)).sum().backward()
    twins.gather()
    assert weight.grad is not None
