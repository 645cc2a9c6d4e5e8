"""The start-up self-check passes what is right and names what is wrong.

Run: python -m pytest tests/trainer/test_selfcheck.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import small_library
from test_kill_and_resume import section
from tiny_models import VOCABULARY, save_target

from trainer import config as configs
from trainer.data.batch import Batch
from trainer.data.packing import Document, Rows, pack
from trainer.errors import Refused
from trainer.model.drafter import Drafter
from trainer.model.mask import Bounds
from trainer.model.tapped_model import States
from trainer.model.target import Target
from trainer.process.runfiles import RunFiles
from trainer.run import selfcheck
from trainer.run.train import run
from trainer.training.objective import Blocks, draw
from trainer.training.step import DrafterStep

WINDOW = 6


def packed(seed: int = 3, row_tokens: int = 30) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for size in (17, 9, 12, 22, 30, 3):
        tokens = torch.randint(2, VOCABULARY, (size,), generator=generator).tolist()
        documents.append(Document(tokens, [place >= 2 and place % 5 != 4 for place in range(size)]))
    return pack(documents, row_tokens)


def parts(
    make_drafter: Callable[..., Drafter],
    make_target: Callable[..., Target],
    attention: str = "dense",
    **settings: Any,
) -> tuple[DrafterStep, Target, Batch, torch.Tensor]:
    objective = settings.pop("objective", {})
    gamma = None if objective.get("weighting") == "dpace" else 3.0
    config = configs.load(
        {
            "target": {"path": "unused"},
            "drafter": {"mask_token_id": 1, "block_size": 4},
            "objective": {"anchors_per_document": 5, "gamma": gamma, **objective},
            "precision": "float32",
            **settings,
        }
    )
    target, rows = make_target(), packed()
    states = target.states(rows.tokens, rows.positions, rows.documents)
    step = DrafterStep(make_drafter(("sliding_attention", "full_attention")), target, config, 9)
    step.attention = attention  # what our kernels are told can be made without a GPU
    return step, target, Batch(rows, states), draw((len(rows), 30), 0, 0, 0)


@pytest.mark.parametrize("attention", ["dense", "flex", "triton"])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_what_is_right_passes(
    make_drafter: Callable[..., Drafter],
    make_target: Callable[..., Target],
    attention: str,
    weighting: str,
) -> None:
    """Packed documents, dead blocks, unsupervised tokens, sliding and full layers."""
    made = parts(make_drafter, make_target, attention=attention, objective={"weighting": weighting})
    step, _, batch, uniform = made
    blocks = step.blocks(batch.rows, uniform)
    assert not bool(blocks.keep.all()) and not bool(blocks.supervised[blocks.keep].all())
    found = selfcheck.check(*made)
    keys = 30 + 9 * 4
    assert found.mask_elements == 2 * len(batch.rows) * 9 * 4 * keys
    assert found.slots == len(batch.rows) * 9 * 3 and found.taps == 3 and found.tap_error < 1e-5


@pytest.mark.parametrize("gamma", [0.01, 0.02, 0.5])
def test_weights_of_a_small_gamma_are_right_to_the_digits_that_they_have(
    make_drafter: Callable[..., Drafter], make_target: Callable[..., Target], gamma: float
) -> None:
    """exp(-100) has seven bits in float32: it was refused as a fault of the trainer."""
    assert selfcheck.check(*parts(make_drafter, make_target, objective={"gamma": gamma})).slots


def test_a_large_batch_is_sampled(
    make_drafter: Callable[..., Drafter],
    make_target: Callable[..., Target],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selfcheck, "MASK_ELEMENTS", 1000)
    monkeypatch.setattr(selfcheck, "LABEL_SLOTS", 40)
    found = selfcheck.check(*parts(make_drafter, make_target))
    assert found.mask_elements == 2 * 3 * 4 * 66 and found.slots == 10 * 3


Harm = Callable[[Bounds], Bounds]
MASKS: dict[str, tuple[Harm, str]] = {
    "the anchor's own state": (lambda b: dataclasses.replace(b, high=b.high + 1), "sees context token"),
    "one token short": (lambda b: dataclasses.replace(b, high=b.high - 1), "misses context token"),
    "the document before": (
        lambda b: dataclasses.replace(b, low=torch.zeros_like(b.low)),
        "sees context token 0",
    ),
    "dead blocks": (
        lambda b: dataclasses.replace(b, alive=torch.ones_like(b.alive)),
        "slot 0 of the block at token 0 sees",
    ),
    "causal": (lambda b: dataclasses.replace(b, causal=True), "misses key"),
    "two blocks as one": (lambda b: dataclasses.replace(b, block_size=2 * b.block_size), "sees key"),
}


@pytest.mark.parametrize("attention", ["dense", "flex", "triton"])
@pytest.mark.parametrize("name", MASKS)
def test_a_wrong_mask_is_refused(
    make_drafter: Callable[..., Drafter],
    make_target: Callable[..., Target],
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    name: str,
) -> None:
    import trainer.training.step as steps

    harm, message = MASKS[name]
    real = steps.bounds
    monkeypatch.setattr(steps, "bounds", lambda *arguments: harm(real(*arguments)))
    made = parts(make_drafter, make_target, attention=attention)
    with pytest.raises(
        Refused, match=r"[\d,]+ of [\d,]+ elements of the mask .* are wrong; in row"
    ) as caught:
        selfcheck.check(*made)
    assert message in caught.value.what and caught.value.exit_code == 4


def test_a_tile_that_is_left_out_is_refused(
    make_drafter: Callable[..., Drafter],
    make_target: Callable[..., Target],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule is right, but flex attention would never ask it there."""
    import trainer.training.step as steps

    real = steps.flex_mask

    def without(rule: Bounds) -> Any:
        mask = real(rule)
        mask.kv_num_blocks.zero_()
        return mask

    monkeypatch.setattr(steps, "flex_mask", without)
    with pytest.raises(Refused, match="misses context token"):
        selfcheck.check(*parts(make_drafter, make_target, attention="flex"))


LABELS: dict[str, tuple[Callable[[Blocks], dict[str, Any]], str]] = {
    "one token on": (lambda b: {"labels": b.labels + 1}, r"slot \d: label is"),
    "too many": (lambda b: {"supervised": torch.ones_like(b.supervised)}, "trained on is True"),
    "no decay": (lambda b: {"weights": b.supervised.float()}, "slot 2: weight is 1.0"),
    "another anchor": (lambda b: {"anchors": (b.anchors - 1).clamp(min=0)}, "block"),
    "no mask token": (lambda b: {"tokens": b.tokens.clamp(min=2)}, "token is 2, should be 1"),
    "positions": (lambda b: {"positions": b.positions + 1}, "position is"),
}


@pytest.mark.parametrize("name", LABELS)
def test_wrong_labels_are_refused(
    make_drafter: Callable[..., Drafter],
    make_target: Callable[..., Target],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    harm, message = LABELS[name]
    made = parts(make_drafter, make_target)
    blocks = made[0].blocks(made[2].rows, made[3])
    wrong = dataclasses.replace(blocks, **harm(blocks))
    monkeypatch.setattr(made[0], "blocks", lambda rows, uniform: wrong)
    with pytest.raises(Refused, match=rf"self-check of labels: row .*{message}"):
        selfcheck.check(*made)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-sliding", "llama", "smollm", "qwen3.5"])
def test_taps_of_every_kind_of_target(make_target: Callable[..., Target], kind: str) -> None:
    target, rows = make_target(kind), packed()
    states = target.states(rows.tokens, rows.positions, rows.documents)
    assert selfcheck.check_taps(target, rows, states) < 1e-4
    shifted = make_target(kind, (1, 3, 4))
    others = shifted.states(rows.tokens, rows.positions, rows.documents)
    with pytest.raises(Refused, match=r"tap 0 is .* nearest to hidden_states\[2\], not \[1\]"):
        selfcheck.check_taps(target, rows, others)
    near = States(states.taps * 1.1)
    with pytest.raises(Refused, match=r"tap 0 is 0\.100 off"):
        selfcheck.check_taps(target, rows, near)


@pytest.mark.parametrize("attention", ["dense", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_leaky_mask_stops_a_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    import trainer.training.step as steps

    real = steps.bounds
    leak = MASKS["the anchor's own state"][0]
    monkeypatch.setattr(steps, "bounds", lambda *arguments: leak(real(*arguments)))
    library = small_library(tmp_path / "library")
    monkeypatch.setattr("trainer.data.stdlib.root", lambda: library)
    made = section(save_target(tmp_path / "target"), attention=attention)
    with pytest.raises(Refused, match=r"self-check of the mask: .*sees context token"):
        run(configs.load(made), RunFiles(tmp_path / "run"), lambda text: None)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
