"""Anchors in passes that share one context: the same loss and gradients as everything in one graph.

Run: python -m pytest tests/trainer/test_passes.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_step import LAYERS, PER_DOCUMENT, documents, settings
from torch import Tensor

from trainer import config as configs
from trainer.data.anchors import needed_width
from trainer.data.batch import Batch
from trainer.data.packing import Rows, pack
from trainer.model.drafter import Drafter
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.topology.work import _generator, row_gradients
from trainer.training.loss import Sums
from trainer.training.objective import draw
from trainer.training.step import DrafterStep

Makers = tuple[Callable[..., Drafter], Callable[..., Target]]


@pytest.fixture
def makers(make_drafter: Callable[..., Drafter], make_target: Callable[..., Target]) -> Makers:
    return make_drafter, make_target


class Case:
    """A step over packed rows, in float64: what differs then is a fault, not rounding."""

    def __init__(self, makers: Makers, layers: Any, rows: Rows, **objective: Any) -> None:
        self.drafter, target = makers[0](layers).double(), makers[1]()
        states = target.states(rows.tokens, rows.positions, rows.documents, full=True)
        assert states.final is not None
        self.batch = Batch(rows, States(states.taps.double(), states.final.double()))
        self.config = settings(**objective)
        width = needed_width(rows, self.config.objective.anchors_per_document)
        self.step = DrafterStep(self.drafter, target, self.config, width)
        self.step.compute_dtype, self.step.head = torch.float64, self.step.head.double()

    def uniforms(self, count: int) -> list[Tensor]:
        return [draw(self.batch.rows.tokens.shape, 0, 0, replay) for replay in range(count)]

    def found(self, run: Callable[[], Sums]) -> tuple[Sums, dict[str, Tensor]]:
        self.drafter.zero_grad()
        sums = run()
        gradients = {name: each.grad for name, each in self.drafter.named_parameters()}
        return sums, {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def plain(self, uniforms: list[Tensor], noises: Any = None) -> tuple[Sums, dict[str, Tensor]]:
        """One graph for each replay, its context and its blocks together."""

        def run() -> Sums:
            every = [
                self.step.sums(self.batch, uniform, noise)
                for uniform, noise in zip(uniforms, noises or [None] * len(uniforms), strict=True)
            ]
            for sums in every:
                sums.loss.backward()
            total = every[0]
            for sums in every[1:]:
                total = total + sums
            return total

        return self.found(run)


def assert_equal(one: tuple[Sums, dict[str, Tensor]], other: tuple[Sums, dict[str, Tensor]]) -> None:
    for name in one[0].__dataclass_fields__:
        torch.testing.assert_close(getattr(one[0], name), getattr(other[0], name), rtol=1e-6, atol=1e-9)
    assert one[1].keys() == other[1].keys() and "fc.weight" in one[1]
    for name, gradient in one[1].items():
        scale = float(gradient.abs().max())
        assert scale > 0
        # The loss's own figures are float32 and better, so gradients agree to that.
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-6, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize("labels", ["data", "kl"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("replays", "per_pass"), [(1, None), (3, None), (1, 5), (2, 1), (2, 4)])
def test_passes_and_replays_on_one_context_equal_one_graph(
    makers: Makers, layers: Any, labels: str, replays: int, per_pass: int | None
) -> None:
    rows = pack(documents(), 25)
    case = Case(
        makers,
        layers,
        rows,
        labels=labels,
        anchors_per_pass=per_pass,
        anchors_per_document=6,
        replays=replays,
    )
    plain = Case(makers, layers, rows, labels=labels, anchors_per_document=6)
    uniforms = case.uniforms(replays)
    assert case.step.pass_count == (1 if per_pass is None else -(-case.step.width // per_pass))
    wanted = plain.plain(uniforms)
    assert wanted[0].weight > 10
    assert_equal(wanted, case.found(lambda: case.step.gradients(case.batch, uniforms)))


def test_the_context_is_computed_once_however_many_passes_read_it(makers: Makers) -> None:
    case = Case(makers, LAYERS[0], pack(documents(), 25), anchors_per_pass=3, replays=2)
    calls: list[Any] = []
    case.drafter.fc.register_forward_hook(lambda *_: calls.append("fc"))
    case.drafter.layers[0].mlp.register_forward_hook(lambda *_: calls.append("blocks"))
    case.step.gradients(case.batch, case.uniforms(2))
    assert calls.count("fc") == 1 and calls.count("blocks") == 2 * case.step.pass_count > 4


def test_with_input_noise_each_replay_has_a_context_of_its_own(makers: Makers) -> None:
    """Its noise differs, so a shared context would be another training."""
    case = Case(makers, LAYERS[0], pack(documents(), 25), input_noise=5.0, anchors_per_pass=4)
    case.drafter.train()
    uniforms, rows = case.uniforms(2), range(len(case.batch.rows))

    def noises() -> list[list[torch.Generator]]:
        return [[_generator(torch.device("cpu"), 0, 0, replay, row) for row in rows] for replay in range(2)]

    wanted = case.plain(uniforms, noises())
    assert_equal(wanted, case.found(lambda: case.step.gradients(case.batch, uniforms, noises())))
    same = [noises()[0], noises()[0]]
    other = case.found(lambda: case.step.gradients(case.batch, uniforms, same))
    assert not torch.allclose(wanted[0].loss, other[0].loss, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_precision_of_training_passes_are_as_exact_as_one_graph(makers: Makers, dtype: Any) -> None:
    """bfloat16: the gradients of the keys and values of 40 passes are summed in float32."""
    case = Case(makers, LAYERS[0], pack(documents(), 40), anchors_per_pass=1)
    exact = case.plain(case.uniforms(1))[1]["fc.weight"].flatten().float()
    case.drafter.float()
    case.step.compute_dtype, case.step.head = dtype, case.step.head.to(dtype)
    assert case.step.pass_count > 20
    errors = []
    for run in (case.plain, lambda u: case.found(lambda: case.step.gradients(case.batch, u))):
        got = run(case.uniforms(1))[1]["fc.weight"].flatten()
        errors.append(float((got - exact).norm() / exact.norm()))
    assert errors[1] < 1.2 * errors[0] + 1e-5, errors


def test_a_batch_in_micro_rows_and_passes_is_the_whole_batch(makers: Makers) -> None:
    rows = pack(documents((24, 24, 20, 3, 3, 24, 24)), 24)
    section = {"anchors_per_document": 3, "replays": 2}
    whole = Case(makers, LAYERS[1], rows, **section)
    cut = Case(makers, LAYERS[1], rows, **section, anchors_per_pass=2)
    results = []
    for case, micro in ((whole, None), (cut, 2)):
        config = configs.load(
            {
                "target": {"path": "unused"},
                "drafter": {"mask_token_id": 1, "block_size": 4},
                "objective": {**section, "gamma": 3.0},
                "token_budget": 24 * len(rows),
                "micro_rows": micro,
                "data": {"row_tokens": 24, "continuations": False},
            }
        )
        run = partial(row_gradients, case.step, config, case.batch, 3, slice(0, len(rows)))
        results.append(case.found(run))
    assert len(rows) == 6
    assert_equal(*results)


def test_a_row_of_dead_blocks_and_a_width_that_no_pass_divides(makers: Makers) -> None:
    """The spare blocks of the last pass, and rows with nothing to train on, change nothing."""
    rows = pack(documents((24, 24)), 24)
    rows.supervised[1] = False
    case = Case(makers, LAYERS[0], rows, anchors_per_pass=6, anchors_per_document=PER_DOCUMENT)
    width = case.step.width
    assert width % 6 and case.step.pass_count * case.step.pass_width > width
    blocks = case.step.blocks(rows, case.uniforms(1)[0])
    assert not blocks.keep[1].any() and not blocks.keep[0, width:].any() and blocks.keep[0, :width].all()
    plain = Case(makers, LAYERS[0], rows)
    wanted = plain.plain(plain.uniforms(1))
    assert_equal(wanted, case.found(lambda: case.step.gradients(case.batch, case.uniforms(1))))
