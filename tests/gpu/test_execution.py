"""Run on a machine with a GPU: pytest -m gpu tests/gpu/test_execution.py. Real CUDA graphs and Inductor give
what the eager step gives, without waiting for the device once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from test_optim import hold_updates_to_the_plain_ones

from trainer import config as configs
from trainer.bench.shapes import SHAPES, batch_of, drafter_of, ends_of
from trainer.training.execution import captured
from trainer.training.objective import draw
from trainer.training.optim import DrafterOptimizer
from trainer.training.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
ROWS, ROW, WIDTH = 2, 1024, 48


def step_of(execution: str) -> DrafterStep:
    shape, device = SHAPES["small"], torch.device("cuda")
    section: dict[str, Any] = {
        "target": {"path": "unused"},
        "drafter": {"mask_token_id": 0},
        "objective": {"anchors_per_pass": 16},
        "execution": execution,
    }
    drafter = drafter_of(shape, device).train()
    return DrafterStep(drafter, ends_of(shape, device), configs.load(section), WIDTH)


@pytest.mark.parametrize("execution", ["compiled", "captured"])
def test_the_step_equals_the_eager_one(gpus: int, execution: str) -> None:
    eager, other = step_of("eager"), step_of(execution)
    other.drafter.load_state_dict(eager.drafter.state_dict())
    for number in range(4):
        batch = batch_of(SHAPES["small"], ROWS, ROW, torch.device("cuda"), seed=number)
        uniform = draw((ROWS, ROW), 0, number, 0).cuda()
        found = []
        for step in (eager, other):
            sums = step.gradients(batch, [uniform])
            found.append((sums, [parameter.grad.clone() for parameter in step.drafter.parameters()]))  # type: ignore[union-attr]
            for parameter in step.drafter.parameters():
                parameter.grad = None
        assert torch.allclose(found[0][0].loss, found[1][0].loss, rtol=5e-3)
        for one, two in zip(found[0][1], found[1][1], strict=True):
            assert (one - two).norm() <= 0.03 * one.norm()


def test_the_gate_lets_a_true_graph_pass(gpus: int) -> None:
    step = step_of("compiled")
    batch = batch_of(SHAPES["small"], ROWS, ROW, torch.device("cuda"))
    captured(step._gradients, step.drafter, batch, [draw((ROWS, ROW), 0, 0, 0).cuda()])


@pytest.mark.parametrize("execution", ["eager", "compiled", "captured"])
def test_a_step_with_its_update_never_waits_for_the_device(gpus: int, execution: str) -> None:
    step = step_of(execution)
    optimizer = DrafterOptimizer(step.drafter, configs.Optimizer())
    batch = batch_of(SHAPES["small"], ROWS, ROW, torch.device("cuda"))
    uniform = draw((ROWS, ROW), 0, 0, 0).cuda()

    def whole() -> None:
        optimizer.step(1.0, step.gradients(batch, [uniform]).weight)

    for _ in range(3):
        whole()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [0.0, 0.7, 1e6])
def test_updates_equal_the_plain_ones(gpus: int, algorithm: str, clip: float) -> None:
    hold_updates_to_the_plain_ones(algorithm, clip, "cuda")


def test_a_bad_gradient_changes_nothing(gpus: int) -> None:
    step = step_of("eager")
    optimizer = DrafterOptimizer(step.drafter, configs.Optimizer())
    for value in (1.0, torch.nan, 1.0):
        before = [parameter.detach().clone() for parameter in step.drafter.parameters()]
        for parameter in step.drafter.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(1.0, torch.ones((), device="cuda"))
        same = all(torch.equal(a, b) for a, b in zip(before, step.drafter.parameters(), strict=True))
        assert same == (value != 1.0)
    for state in optimizer.algorithms[0].state.values():
        assert float(state["step"]) == 2
