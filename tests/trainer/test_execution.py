"""A compiled and a captured step give what an eager one gives; neither may go wrong in silence.

On a CPU, graphs are played by replayed.py. The real ones: tests/gpu/test_execution.py. Compiling stops before
the C++ compiler, whose time is not ours.

Run: python -m pytest tests/trainer/test_execution.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from replayed import Kept, Stale
from test_passes import Case, assert_equal, makers
from test_step import LAYERS, documents, settings

from trainer import config as configs
from trainer.data.packing import pack
from trainer.errors import ConfigError, Refused, TrainerError
from trainer.training import execution
from trainer.training.execution import CapturedGradients, Execution, captured

__all__ = ["makers"]  # the fixture


@pytest.fixture
def case(makers: Any) -> Case:
    made = Case(
        makers,
        LAYERS[1],
        pack(documents(), 25),
        labels="kl",
        anchors_per_document=5,
        anchors_per_pass=4,
        replays=2,
    )
    made.drafter.train()
    return made


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compile = partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(execution, "compiled", compile)


def replay_of(case: Case, how: type[Any] = Kept) -> CapturedGradients:
    return captured(case.step._gradients, case.drafter, case.batch, case.uniforms(2), how)


def test_a_replayed_step_equals_an_eager_one_on_other_data(case: Case) -> None:
    replay = replay_of(case)
    assert all(parameter.grad is None for parameter in case.drafter.parameters())
    case.batch.states.taps.mul_(-0.7)
    uniforms = [uniform.flip(0) for uniform in case.uniforms(2)]
    wanted = case.found(lambda: case.step._gradients(case.batch, uniforms))
    wanted = (wanted[0], {name: gradient.clone() for name, gradient in wanted[1].items()})
    assert_equal(wanted, case.found(lambda: replay(case.batch, uniforms)))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_replays_add_up_wherever_the_gradients_lie(case: Case, elsewhere: bool) -> None:
    """Over micro-batches; and where a reduction over ranks has put the gradients into memory of its own."""
    replay, uniforms = replay_of(case), case.uniforms(2)

    def twice(gradients: Any) -> Any:
        sums = gradients(case.batch, uniforms)
        if elsewhere:
            for parameter in case.drafter.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone()
        return sums + gradients(case.batch, uniforms)

    wanted = case.found(lambda: twice(case.step._gradients))
    wanted = (wanted[0], {name: gradient.clone() for name, gradient in wanted[1].items()})
    for _ in range(2):  # the second step begins with the graph's own gradients full
        assert_equal(wanted, case.found(lambda: twice(replay)))


@pytest.mark.parametrize(("place", "what"), [(4, "taps"), (5, "numbers for anchors"), (7, "final states")])
def test_a_replay_that_reads_old_data_is_refused(case: Case, place: int, what: str) -> None:
    how = type("How", (Stale,), {"places": (place,)})
    with pytest.raises(Refused, match=r"of a replayed step is .* off that of an eager one"):
        replay_of(case, how)


def test_captured_is_refused_without_a_gpu_and_where_it_cannot_be(case: Case) -> None:
    with pytest.raises(ConfigError, match="captured needs a CUDA GPU, this runs on cpu"):
        Execution("captured", case.drafter, "cpu")
    section = {"target": {"path": "x"}, "drafter": {"mask_token_id": 1}, "execution": "captured"}
    problems = configs.check({**section, "objective": {"input_noise": 0.1}})
    assert any("objective.input_noise: not with execution: captured" in each for each in problems)
    assert any("execution: of the topologies" in e for e in configs.check({**section, "topology": "threads"}))


@pytest.mark.usefixtures("without_inductor")
def test_a_compiled_step_equals_an_eager_one_and_compiles_once(case: Case) -> None:
    uniforms = case.uniforms(2)
    wanted = case.found(lambda: case.step.gradients(case.batch, uniforms))
    wanted = (wanted[0], {name: gradient.clone() for name, gradient in wanted[1].items()})
    case.step.execution = Execution("compiled", case.drafter, "cpu")
    before = execution.counters["stats"]["unique_graphs"]
    graphs = []
    for _ in range(4):
        assert_equal(wanted, case.found(lambda: case.step.gradients(case.batch, uniforms)))
        graphs.append(execution.counters["stats"]["unique_graphs"] - before)
    assert graphs[0] == graphs[3] == 2  # the context's and the blocks'
    case.drafter.eval()
    with torch.no_grad():  # measuring, with another shape: eagerly
        case.step.sums(case.batch.part(slice(0, 1)), uniforms[0][:1])
    assert execution.counters["stats"]["unique_graphs"] == before + 2


@pytest.mark.usefixtures("without_inductor")
def test_compiling_again_at_a_known_shape_ends_the_run(case: Case) -> None:
    uniforms = case.uniforms(2)
    case.step.execution = Execution("compiled", case.drafter, "cpu")
    for _ in range(3):
        case.step.gradients(case.batch, uniforms)
    part, drawn = case.batch.part(slice(0, 1)), [uniform[:1] for uniform in uniforms]
    case.step.gradients(part, drawn)  # another shape may
    case.drafter.norm.eps = 1e-3  # a constant of the compiled code
    with pytest.raises(TrainerError, match="1 parts of the step were compiled again after 3 steps"):
        case.step.gradients(case.batch, uniforms)


def test_eager_is_the_default() -> None:
    assert settings().execution == "eager"
