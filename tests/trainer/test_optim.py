"""Parameter groups, float32 masters, clipping, learning rates.

Run: python -m pytest tests/trainer/test_optim.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config import Optimizer, ParameterGroup, Schedule
from trainer.errors import ConfigError
from trainer.model.drafter import Drafter
from trainer.optim import DrafterOptimizer, assign_groups, lr_factor


def test_every_parameter_of_the_drafter_is_in_exactly_one_group(make_drafter: Callable[..., Drafter]) -> None:
    drafter = make_drafter(("sliding_attention", "full_attention"), attention_bias=True)
    described = DrafterOptimizer(drafter, Optimizer(lr=0.01)).describe()
    assert [each["parameter"] for each in described] == [name for name, _ in drafter.named_parameters()]
    groups = {str(each["parameter"]).split(".")[-2] + "/" + str(each["group"]) for each in described}
    assert {"q_proj/matrices", "fc/matrices", "k_norm/norms", "norm/norms", "hidden_norm/norms"} <= groups
    assert all(each["lr"] == 0.01 for each in described)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([ParameterGroup("a", ["*_proj.weight"])], r"parameter .*norm.* is in no group"),
        ([ParameterGroup("a", ["*"]), ParameterGroup("b", ["fc.*"])], r"parameter fc\.weight is in a and b"),
        ([ParameterGroup("a", ["*"]), ParameterGroup("b", ["nothing"])], "group b matches no parameter"),
        ([ParameterGroup("a", ["*"], algorithm="muon")], "group a has parameters that are no matrices"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    make_drafter: Callable[..., Drafter], groups: list[ParameterGroup], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterOptimizer(make_drafter(), Optimizer(groups=groups))


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 4).to(dtype)


ALL = [ParameterGroup("all", ["*"])]


def train(
    module: nn.Module, section: Optimizer, steps: int, weight: float = 1.0, factor: float = 1.0
) -> list[float]:
    optimizer = DrafterOptimizer(module, section)
    norms = []
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        parameter = next(module.parameters())
        (module(x.to(parameter.dtype)).float() ** 2).sum().mul(weight).backward()
        norms.append(float(optimizer.step(factor, torch.tensor(weight))))
    return norms


def test_steps_equal_torchs_own_adamw_with_clipping() -> None:
    groups = [ParameterGroup("w", ["weight"], lr_scale=0.5, weight_decay=0.1), ParameterGroup("b", ["bias"])]
    section = Optimizer(lr=0.05, beta1=0.8, beta2=0.9, clip=0.7, groups=groups)
    mine, theirs = small(), small()
    adam = torch.optim.AdamW(
        [
            {"params": [theirs.weight], "lr": 0.05 * 0.5 * 0.3, "weight_decay": 0.1},
            {"params": [theirs.bias], "lr": 0.05 * 0.3, "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
    )
    norms = train(mine, section, 6, factor=0.3)
    for step in range(6):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        (theirs(x) ** 2).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
        assert norms[step] == pytest.approx(float(norm), rel=1e-5) and norm > 0.7
        adam.step()
        adam.zero_grad()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_sum_of_weights_divides_the_gradient() -> None:
    one, other = small(), small()
    assert train(one, Optimizer(groups=ALL), 3) == pytest.approx(
        train(other, Optimizer(groups=ALL), 3, weight=64.0)
    )
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_masters_keep_updates_that_bfloat16_would_lose() -> None:
    """Updates of 1e-5 on weights near 1: a bfloat16 weight alone would never move."""
    module = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(module.weight)
    optimizer = DrafterOptimizer(module, Optimizer(lr=1e-5, clip=0.0, groups=ALL))
    for _ in range(1000):
        module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1.0, torch.tensor(1.0))
    assert module.weight.dtype == torch.bfloat16 and optimizer.masters[0].dtype == torch.float32
    assert torch.allclose(optimizer.masters[0], torch.full((1, 4), 0.99), atol=1e-3)
    assert torch.allclose(module.weight.float(), torch.full((1, 4), 0.99), atol=4e-3)


def test_muon_trains_matrices_beside_adamw(make_drafter: Callable[..., Drafter]) -> None:
    groups = [
        ParameterGroup("matrices", ["*_proj.weight", "fc.weight"], algorithm="muon"),
        ParameterGroup("norms", ["*norm.weight"]),
    ]
    drafter = make_drafter()
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    optimizer = DrafterOptimizer(drafter, Optimizer(lr=0.01, groups=groups))
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(1.0, torch.tensor(1.0))
    for name, parameter in drafter.named_parameters():
        change = (parameter - before[name]).detach()
        assert change.abs().max() > 1e-4, name
        if name == "fc.weight":  # an orthogonal update of AdamW's size: all singular values alike
            values = torch.linalg.svdvals(change)
            assert values.max() / values.min() < 3
            assert 0.1 < change.pow(2).mean().sqrt() / 0.01 < 0.5
    assert set(optimizer.state_dict()) == {"matrices", "norms"}


def curve(schedule: Schedule, steps: int, warmup: int) -> list[float]:
    return [lr_factor(schedule, step, step / steps, warmup) for step in range(steps + 1)]


@pytest.mark.parametrize(
    "changes", [{"kind": "cosine"}, {"kind": "constant_linear"}, {"kind": "cosine", "floor": 0.1}]
)
def test_learning_rates_warm_up_and_come_down(changes: dict[str, Any]) -> None:
    schedule = Schedule(**changes)
    values = curve(schedule, 100, 10)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[-1] == pytest.approx(schedule.floor) and max(values) <= 1.0
    if schedule.kind == "cosine":
        middle = schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * 0.3))
        assert values[30] == pytest.approx(middle)
    else:
        assert values[10:51] == [1.0] * 41 and values[75] == pytest.approx(0.5)


def test_assignments_keep_names_and_shapes() -> None:
    assigned = assign_groups(small().named_parameters(), ALL)
    assert [(each.name, each.shape) for each in assigned] == [("weight", (4, 6)), ("bias", (4,))]
