"""Parameter groups, float32 masters, clipping, non-finite gradients, learning rates.

Run: python -m pytest tests/trainer/test_optim.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer.checkpoint.optimizer_state import masters, moments
from trainer.culprits import Culprits
from trainer.errors import ConfigError, TrainerError
from trainer.model.drafter import Drafter
from trainer.run.progress import Tally
from trainer.sections import Optimizer, ParameterGroup, Schedule
from trainer.topology.work import not_finite
from trainer.training.bad_steps import BadSteps
from trainer.training.groups import assign_groups
from trainer.training.loss import Sums
from trainer.training.optim import DrafterOptimizer
from trainer.training.schedule import lr_factor


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


def small(dtype: torch.dtype = torch.float32) -> nn.Linear:
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


class Plain:
    """The update written out: divide, clip, skip what is not finite, AdamW. Muon is torch's own, given
    divided and clipped gradients.
    """

    def __init__(self, module: nn.Module, section: Optimizer, groups: dict[str, ParameterGroup]) -> None:
        self.section, self.groups, self.count = section, groups, 0
        self.weights = {name: each.detach().clone() for name, each in module.named_parameters()}
        self.first = {name: torch.zeros_like(each) for name, each in self.weights.items()}
        self.second = {name: torch.zeros_like(each) for name, each in self.weights.items()}
        self.muons = {
            name: torch.optim.Muon(
                [self.weights[name]],
                momentum=section.momentum,
                weight_decay=group.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            for name, group in groups.items()
            if group.algorithm == "muon"
        }

    def step(self, factor: float, sums: dict[str, torch.Tensor], weight: float) -> float:
        section = self.section
        gradients = {name: each / weight for name, each in sums.items()}
        norm = math.sqrt(sum(float(each.double().pow(2).sum()) for each in gradients.values()))
        if not math.isfinite(norm):
            return norm
        self.count += 1
        for name, gradient in gradients.items():
            if section.clip:
                gradient = gradient * min(1.0, section.clip / (norm + 1e-6))
            group, held = self.groups[name], self.weights[name]
            rate = section.lr * group.lr_scale * factor
            if name in self.muons:
                self.muons[name].param_groups[0]["lr"] = rate
                held.grad = gradient
                self.muons[name].step()
                self.first[name] = self.muons[name].state[held]["momentum_buffer"]
                continue
            one, two = self.first[name], self.second[name]
            one.mul_(section.beta1).add_((1 - section.beta1) * gradient)
            two.mul_(section.beta2).add_((1 - section.beta2) * gradient**2)
            held.mul_(1 - rate * group.weight_decay)
            size = (two / (1 - section.beta2**self.count)).sqrt() + section.eps
            held.sub_(rate * one / (1 - section.beta1**self.count) / size)
        return norm


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [0.0, 0.7, 1e6], ids=["unclipped", "clipped", "below the limit"])
def test_updates_equal_the_plain_ones(algorithm: str, clip: float) -> None:
    hold_updates_to_the_plain_ones(algorithm, clip, "cpu")


def hold_updates_to_the_plain_ones(algorithm: str, clip: float, device: str) -> None:
    """Sums and their weight, clipping, bad steps among good ones, groups of other rates and decays."""
    matrix = ParameterGroup("m", ["*weight"], algorithm, 0.5, 0.1)  # type: ignore[arg-type]
    rest = ParameterGroup("r", ["*bias"], weight_decay=0.2)
    section = Optimizer(lr=0.02, beta1=0.8, beta2=0.9, clip=clip, groups=[matrix, rest])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8)).to(device)
    groups = {name: matrix if "weight" in name else rest for name, _ in module.named_parameters()}
    plain, optimizer = Plain(module, section, groups), DrafterOptimizer(module, section)
    spoilt = {2: math.nan, 4: math.inf}
    for number in range(8):
        weight, factor = 1000.0 + 37 * number, 1.0 - 0.1 * number
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter) * weight
        if number in spoilt:
            next(module.parameters()).grad.view(-1)[number] = spoilt[number]  # type: ignore[union-attr]
        sums = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
        wanted = plain.step(factor, sums, weight)
        norm = float(optimizer.step(factor, torch.tensor(weight, device=device)))
        if number in spoilt:
            assert not math.isfinite(norm)
        else:
            assert norm == pytest.approx(wanted, rel=1e-6) and (0 < clip < 1) == (norm > clip > 0)
    held = moments(optimizer)
    for name, master in masters(optimizer).items():
        muon = groups[name].algorithm == "muon"
        # Muon makes its update orthogonal in bfloat16, so there rounding is coarser; its momentum is float32.
        torch.testing.assert_close(
            master.detach(), plain.weights[name], rtol=1e-5, atol=1e-3 if muon else 1e-6
        )
        first = "momentum_buffer" if muon else "exp_avg"
        torch.testing.assert_close(held[f"{first}|{name}"], plain.first[name], rtol=1e-5, atol=1e-6)
        if not muon:
            torch.testing.assert_close(held[f"exp_avg_sq|{name}"], plain.second[name], rtol=1e-5, atol=1e-7)
            assert float(held[f"step|{name}"]) == 6


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


def state_of(module: nn.Module, optimizer: DrafterOptimizer) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and step counts, copied."""
    found: dict[str, torch.Tensor] = {f"weight {name}": each for name, each in module.named_parameters()}
    found |= {f"master {name}": each for name, each in masters(optimizer).items()}
    found |= {f"moment {name}": each for name, each in moments(optimizer).items()}
    return {name: each.detach().clone() for name, each in found.items()}


MUON = [ParameterGroup("w", ["weight"], algorithm="muon", weight_decay=0.1), ParameterGroup("b", ["bias"])]


@pytest.mark.parametrize("groups", [ALL, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_with_a_non_finite_gradient_changes_nothing(
    groups: list[ParameterGroup], dtype: torch.dtype, value: float, clip: float
) -> None:
    """Neither the first step nor a later one; the good steps are those of a run that had no bad one."""
    section = Optimizer(lr=0.05, clip=clip, groups=groups)
    spoilt, clean = small(dtype), small(dtype)
    mine, theirs = DrafterOptimizer(spoilt, section), DrafterOptimizer(clean, section)

    def fill(module: nn.Module, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)

    for number in range(4):
        fill(spoilt, 100 + number)
        gradient = spoilt.weight.grad
        assert isinstance(gradient, torch.Tensor)
        gradient.view(-1)[number] = value
        before = state_of(spoilt, mine)
        norm = mine.step(1.0, torch.tensor(1.0))
        assert not norm.isfinite() and spoilt.weight.grad is None and mine.masters[0].grad is None
        for name, held in state_of(spoilt, mine).items():
            assert torch.equal(held, before.get(name, torch.zeros_like(held))), name
        for module, optimizer in ((spoilt, mine), (clean, theirs)):
            fill(module, number)
            assert optimizer.step(0.5, torch.tensor(2.0)).isfinite()
    wanted = state_of(clean, theirs)
    assert any(name.startswith("moment step") and float(held) == 4 for name, held in wanted.items())
    for name, held in state_of(spoilt, mine).items():
        assert torch.equal(held, wanted[name]), name


def test_learning_rates_of_adamw_stay_in_their_tensors() -> None:
    """A captured update reads the rate where it lay when it was captured."""
    optimizer = DrafterOptimizer(
        small(), Optimizer(lr=0.1, groups=[ParameterGroup("a", ["*"], lr_scale=0.5)])
    )
    held = optimizer.algorithms[0].param_groups[0]["lr"]
    optimizer.set_rates(0.25)
    assert optimizer.algorithms[0].param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.1 * 0.5 * 0.25)


def test_bad_steps_are_counted_and_too_many_in_a_row_end_the_run() -> None:
    counter = BadSteps(most=2)
    for step, norm in enumerate([1.0, math.nan, math.inf, 2.0, math.nan, math.nan]):
        counter.saw(step, torch.tensor(norm))
    counter.finish()
    assert counter.total == 4
    with pytest.raises(TrainerError, match="3 steps in a row is not finite, the last of them step 7"):
        counter.saw(6, torch.tensor(math.nan))
    assert BadSteps(most=2).total == 0


@pytest.mark.parametrize(("norms", "total", "in_a_row"), [([math.nan], 6, 2), ([1.0, math.nan], 6, 1)])
def test_bad_steps_go_on_from_where_they_were_saved(norms: list[float], total: int, in_a_row: int) -> None:
    counter = BadSteps(most=2, total=5, in_a_row=1)
    for step, norm in enumerate(norms):
        counter.saw(step, torch.tensor(norm))
    assert (counter.total, counter.in_a_row) == (total, in_a_row)
    again = BadSteps(2, counter.total, counter.in_a_row)
    with pytest.raises(TrainerError, match="3 steps in a row"):
        for step in range(3):
            again.saw(step, torch.tensor(math.inf))
    assert again.total == total + 3 - in_a_row


@pytest.mark.parametrize(
    ("own", "words", "rank"),
    [
        ([[0, 1], [0, 1], [0, 1]], r"by number of steps: rank 1 \(3\)", 1),
        ([[1, 0], [0, 1], [0, 1]], r"rank 1 \(2\), rank 0 \(1\)", 1),
        ([[1, 1], [1, 1], [1, 1]], r"rank 0 \(3\), rank 1 \(3\)", None),
        ([[0, 0], [0, 0], [0, 0]], "each one's own was finite, the sum of them was not", None),
    ],
)
def test_whose_gradients_were_not_finite_is_told(own: list[list[int]], words: str, rank: int | None) -> None:
    """Of the last three steps; what was wrong before a good one is over."""
    counter = BadSteps(most=2)
    seen = [(math.nan, [1, 0]), (1.0, [0, 0]), *((math.nan, each) for each in own)]
    with pytest.raises(TrainerError, match=words) as caught:
        for step, (norm, flags) in enumerate(seen):
            counter.saw(step, torch.tensor(norm), Culprits(torch.tensor(flags), range(2)))
    assert caught.value.rank == rank


def test_one_alone_is_not_told_from_others() -> None:
    counter = BadSteps(most=0)
    with pytest.raises(TrainerError, match="changed anything\n") as caught:
        counter.saw(0, torch.tensor(math.inf))
    assert caught.value.rank is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_seen(value: float) -> None:
    large, small = torch.full((70,), 3e38), torch.zeros(3)
    loss = torch.tensor(2.0)
    assert not bool(not_finite([large, small], loss))  # also where the sum of squares would overflow
    assert bool(not_finite([large, small], torch.tensor(value)))
    large[41] = value
    assert bool(not_finite([large, small], loss))
    assert bool(not_finite([torch.tensor([value], dtype=torch.bfloat16)], loss))


def test_a_report_leaves_out_the_steps_that_were_not_taken() -> None:
    tally = Tally()
    for loss, norm in ((6.0, 1.0), (math.nan, math.nan), (2.0, 3.0)):
        one = torch.tensor(1.0)
        sums = Sums(torch.tensor(loss), 2 * one, one[None], one[None], one, one)
        tally.add(sums, 10, None, torch.tensor(norm))
    metrics = tally.metrics()
    assert metrics["loss"] == 2.0 and metrics["slot_accuracy"] == [1.0] and metrics["prefix_length"] == 2.0
