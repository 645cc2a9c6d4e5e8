"""A replayed update does what an eager one does; where it would not, it is refused or not used.

On a CPU, graphs are played by replayed.py. The real ones: tests/gpu/test_execution.py.

Run: python -m pytest tests/trainer/test_captured_update.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from replayed import Kept, Stale
from test_optim import ALL, MUON, small, state_of
from torch import Tensor

from trainer.checkpoint import optimizer_state
from trainer.errors import Refused
from trainer.model.drafter import Drafter
from trainer.sections import Optimizer, ParameterGroup
from trainer.training.captured_update import CapturedUpdates, captured_update, place_aside
from trainer.training.execution import Execution
from trainer.training.optim import DrafterOptimizer
from trainer.training.twins import Twins

GROUPS = [ParameterGroup("w", ["weight"], lr_scale=0.5, weight_decay=0.1), ParameterGroup("b", ["bias"])]


class Case:
    """A module whose gradients lie in fixed buffers, as those of a captured step do."""

    def __init__(self, dtype: torch.dtype = torch.float32, **section: Any) -> None:
        self.module = small(dtype)
        self.optimizer = DrafterOptimizer(self.module, Optimizer(lr=0.05, **{"groups": GROUPS, **section}))
        self.buffers = [torch.zeros_like(parameter) for parameter in self.module.parameters()]

    def fill(self, number: int, value: float | None = None) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter, buffer in zip(self.module.parameters(), self.buffers, strict=True):
            parameter.grad = buffer.normal_(generator=generator).mul_(1 + number)
        if value is not None:
            self.buffers[0].view(-1)[number] = value

    def step(self, number: int, update: Any = None, value: float | None = None) -> Tensor:
        self.fill(number, value)
        return self.optimizer.step(0.9**number, torch.tensor(3.0 + number), update)

    def state(self) -> dict[str, Tensor]:
        return state_of(self.module, self.optimizer)


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert set(one) == set(two)
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


class Counting(Kept):
    """One that says how often it was run."""

    made: ClassVar[list[Counting]] = []

    def __init__(self, function: Callable[[list[Tensor]], list[Tensor]], inputs: Sequence[Tensor]) -> None:
        super().__init__(function, inputs)
        self.runs = 0
        self.made.append(self)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.runs += 1
        return super().__call__(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_replayed_updates_equal_eager_ones_bad_ones_among_them(
    dtype: torch.dtype, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "made", [])
    eager, other, updates = Case(dtype, clip=clip), Case(dtype, clip=clip), CapturedUpdates(Counting)
    before = torch.get_rng_state()
    for number in range(8):
        value = torch.inf if number in (1, 6) else None
        wanted, found = eager.step(number, None, value), other.step(number, updates, value)
        assert torch.equal(wanted, found) or not (wanted.isfinite() or found.isfinite())
        assert_same(eager.state(), other.state())  # also after the step that captures
    assert [each.runs for each in Counting.made] == [
        1 + 4
    ]  # the first step makes the moments; two with them are eager, one captures
    assert torch.equal(torch.get_rng_state(), before)


def test_capturing_leaves_weights_moments_and_rates_as_they_are() -> None:
    case = Case()
    case.step(0)
    case.fill(1)
    before = case.state() | {name: each.clone() for name, each in case.optimizer.held().items()}
    captured_update(case.optimizer, torch.tensor(2.0), Kept)
    assert_same(before, case.state() | case.optimizer.held())


class OldGradients(Kept):
    """One that reads gradients of another place: those that were there first."""

    case: Case
    places: tuple[int, ...] = ()

    def __init__(self, function: Callable[[list[Tensor]], list[Tensor]], inputs: Sequence[Tensor]) -> None:
        super().__init__(function, inputs)
        self.old = [torch.full_like(each, 0.25) for each in self.case.buffers]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        parameters = self.case.module.parameters()
        for place, (parameter, old) in enumerate(zip(parameters, self.old, strict=True)):
            if place in self.places:
                assert parameter.grad is not None
                parameter.grad.copy_(old)
        return super().__call__(inputs)


class OldRates(Kept):
    """One in which the learning rates are constants."""

    case: Case

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.case.optimizer.set_rates(1.0)
        return super().__call__(inputs)


@pytest.mark.parametrize(
    ("how", "places", "what"),
    [
        (Stale, (0,), "the gradient's norm"),
        (OldGradients, (0, 1), "the gradient's norm"),
        (OldGradients, (1,), "the change of .*"),
        (OldRates, (), "the change of weight"),
    ],
)
def test_an_update_that_reads_something_old_is_refused(
    how: type[Kept], places: tuple[int, ...], what: str
) -> None:
    case = Case(clip=0.0)
    case.step(0)
    case.fill(1)
    before = case.state()
    made = type("How", (how,), {"places": places, "case": case})
    with pytest.raises(Refused, match=f"{what} of a replayed step is .* off that of an eager one"):
        captured_update(case.optimizer, torch.tensor(2.0), made)
    assert_same(before, case.state())


def test_moments_that_were_loaded_lie_elsewhere_and_are_what_is_trained() -> None:
    """A graph would go on with the memory of those before."""
    eager, other, updates = Case(), Case(), CapturedUpdates(Kept)
    for case, update in ((eager, None), (other, updates)):
        for number in range(6):
            case.step(number, update)
        weights = {name: each.detach().clone() for name, each in case.module.named_parameters()}
        saved = {name: each.clone() for name, each in optimizer_state.moments(case.optimizer).items()}
        case.step(6, update)
        optimizer_state.load(case.optimizer, weights, saved)
        for number in range(7, 12):
            case.step(number, update)
    assert_same(eager.state(), other.state())


class Uncounted(Kept):
    """Like a CUDA graph, which writes memory without torch's counting it in the tensors' versions."""

    case: Case

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.case.module.parameters())):
            return super().__call__(inputs)


def test_a_replayed_update_makes_the_twins_stale() -> None:
    """A pass outside the graph, of another shape for instance, would multiply by the weights of before."""
    case = Case()
    updates = CapturedUpdates(type("How", (Uncounted,), {"case": case}))
    twins = Twins(case.module, torch.bfloat16)
    for number in range(8):
        case.step(number, updates)
        with twins.standing_in():
            pass
        assert all(torch.equal(twin, master.bfloat16()) for _, _, master, twin in twins._places), number
    assert twins._places


def test_an_update_without_a_gradient_stays_eager_for_it_will_lie_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counting, "made", [])
    eager, other, updates = Case(), Case(), CapturedUpdates(Counting)
    for number in range(6):
        for case in (eager, other):
            case.fill(number)
            next(case.module.parameters()).grad = None
        wanted = eager.optimizer.step(0.5, torch.tensor(2.0))
        assert torch.equal(other.optimizer.step(0.5, torch.tensor(2.0), updates), wanted)
    assert_same(eager.state(), other.state())
    assert not Counting.made


@pytest.mark.parametrize(
    ("device", "size", "free", "available", "where"),
    [
        ("cuda", 4, 8, 0, "cuda"),
        ("cuda", 5, 8, 5, "cpu"),
        ("cuda", 5, 8, None, "cpu"),
        ("cpu", 5, 8, 9, "cpu"),
        ("cuda", 5, 8, 4, None),
    ],
)
def test_weights_and_moments_are_kept_where_there_is_room(
    device: str,
    size: int,
    free: int,
    available: int | None,
    where: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.training.captured_update.free_memory", lambda device: free << 30)
    known = None if available is None else available << 30
    monkeypatch.setattr("trainer.training.captured_update.available_memory", lambda: known)
    if where is not None:
        assert place_aside(size << 30, torch.device(device)) == torch.device(where)
        return
    with pytest.raises(Refused, match=r"5\.00 GiB are needed .* captured; 4\.00 GiB of memory are available"):
        place_aside(size << 30, torch.device(device))


@pytest.mark.parametrize(("groups", "captured"), [(ALL, True), (MUON, False)])
def test_muon_s_update_stays_eager(
    make_drafter: Callable[..., Drafter],
    groups: list[ParameterGroup],
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counting, "made", [])
    monkeypatch.setattr(
        "trainer.training.execution.why_none_here", lambda: None
    )  # as on a GPU with a compiler
    execution, case = Execution("captured", make_drafter(), "cuda"), Case(groups=groups)
    execution._updates = CapturedUpdates(Counting)
    other = copy.deepcopy(case.module)
    wanted = DrafterOptimizer(other, case.optimizer.section)
    for number in range(5):
        case.fill(number)
        for mine, theirs in zip(case.module.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None
            theirs.grad = mine.grad.clone()
        weight = torch.tensor(2.0)
        norm = case.optimizer.step(1.0, weight, execution.update)
        assert torch.equal(norm, wanted.step(1.0, weight))
    assert_same(case.state(), state_of(other, wanted))
    assert (len(Counting.made) == 1) == captured == case.optimizer.capturable
