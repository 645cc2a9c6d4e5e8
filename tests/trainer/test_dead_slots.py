"""Slots that nothing is learnt from cost the frozen head nothing, and change nothing.

Run: python -m pytest tests/trainer/test_dead_slots.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_loss import KINDS, Ledger, plain, problem
from test_passes import Case, Makers, assert_equal
from test_step import LAYERS, documents
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data.batch import Batch, without_bad_rows
from trainer.data.dataset import Dataset
from trainer.data.packing import Rows, from_tokens, pack
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.sections import TrainConfig
from trainer.topology.colocated import Colocated
from trainer.topology.work import row_gradients
from trainer.training.loss import cut, head_loss
from trainer.training.objective import draw
from trainer.training.step import DrafterStep

BLOCKS, SLOTS, WORDS = 7, 4, 50


@pytest.fixture
def makers(make_drafter: Callable[..., Drafter], make_target: Callable[..., Target]) -> Makers:
    return make_drafter, make_target


def mask(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    one = torch.zeros(BLOCKS, SLOTS, dtype=torch.bool)
    one[5, 2] = True
    return {
        "none": torch.zeros_like(one),
        "one": one,
        "a third": torch.rand(BLOCKS, SLOTS, generator=generator) < 0.33,
        "most": torch.rand(BLOCKS, SLOTS, generator=generator) < 0.8,
        "all": torch.ones_like(one),
    }[name]


MASKS = ["none", "one", "a third", "most", "all"]


def under(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The problem of test_loss with this mask."""
    p = problem(BLOCKS, SLOTS, 6, WORDS, dtype)
    p["supervised"] = mask(name)
    p["weights"] = (torch.rand(BLOCKS, SLOTS) + 0.1) * p["supervised"]
    return p


def sums_of(p: dict[str, Tensor], name: str, chunk: int, most: int | None) -> Any:
    kind, teacher = KINDS[name]
    given = p["teacher"] if teacher else None
    return head_loss(
        p["hidden"], p["head"], p["labels"], p["weights"], p["supervised"], kind, given, chunk, most
    )


class HeadRows(TorchDispatchMode):
    """The rows of every product with the head: hidden states into logits, or errors into gradients."""

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        self.head, self.logits, self.back = head, list[int](), list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket is torch.ops.aten.mm and args[1].data_ptr() == self.head.data_ptr():
            into = self.back if args[1].shape == self.head.shape else self.logits
            into.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("chunk", "spare"), [(1, 0), (3, 2), (9, 0), (9, 3), (100, 0)])
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("name", KINDS)
def test_sums_and_gradients_equal_plain_autograd(name: str, masked: str, chunk: int, spare: int) -> None:
    """Also where the host knows a few more than there are: a row may turn out bad on the device."""
    kind, teacher = KINDS[name]
    p = under(masked)
    wanted_loss, wanted_weight = plain(p, kind, teacher)
    (wanted,) = torch.autograd.grad(wanted_loss, p["hidden"])
    sums = sums_of(p, name, chunk, int(p["supervised"].sum()) + spare)
    (got,) = torch.autograd.grad(3.0 * sums.loss, p["hidden"])
    assert torch.allclose(sums.loss, wanted_loss) and torch.allclose(sums.weight, wanted_weight.double())
    assert torch.allclose(got, 3.0 * wanted, atol=1e-12)
    without = sums_of(p, name, chunk, None)
    for each in ("correct", "counted", "prefix", "blocks"):
        assert torch.equal(getattr(sums, each), getattr(without, each)), each


def test_a_slot_that_was_foretold_is_still_counted() -> None:
    """Whatever the order in which slots reach the head, what is right goes back to its own slot."""
    p = under("a third")
    best = (p["hidden"] @ p["head"].T).argmax(-1)
    p["labels"] = torch.where(torch.arange(BLOCKS)[:, None] % 2 == 0, best, (best + 1) % WORDS)
    sums = sums_of(p, "data", 3, int(p["supervised"].sum()))
    assert sums.correct.tolist() == p["supervised"][::2].sum(0).tolist() != p["supervised"].sum(0).tolist()
    assert sums.prefix.item() == p["supervised"][::2].long().cumprod(-1).sum().item() > 0


@pytest.mark.parametrize("chunk", [1, 5, 9, 100])
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("name", KINDS)
def test_only_supervised_slots_are_multiplied_in_chunks_of_one_size(
    name: str, masked: str, chunk: int
) -> None:
    kind, teacher = KINDS[name]
    p = under(masked)
    count, tokens = int(p["supervised"].sum()), BLOCKS * SLOTS
    size = -(-tokens // -(-tokens // chunk))
    with HeadRows(p["head"]) as seen:
        sums_of(p, name, chunk, count).loss.backward()
    chunks = max(-(-count // size), 1 if kind.kl else 0)  # a GPU compiles KL's part in the first batches
    assert seen.back == [size] * chunks
    assert seen.logits == [size] * (chunks * (2 if teacher else 1))
    with HeadRows(p["head"]) as seen:
        sums_of(p, name, chunk, None).loss.backward()
    assert seen.back == [size] * -(-tokens // size)


def test_chunks_by_hand() -> None:
    assert cut(100, 30) == (25, 4) == cut(100, 30, 76) == cut(100, 30, 1000)
    assert cut(100, 30, 75) == (25, 3) and cut(100, 30, 1) == (25, 1)
    assert cut(100, 30, 0) == (25, 0) and cut(100, 30, 0, compiles=True) == (25, 1)
    assert cut(10, 4) == (4, 3) and cut(10, 100, 3) == (10, 1)


@pytest.mark.parametrize("name", ["data", "kl"])
def test_what_a_gpu_compiles_is_compiled_once_for_any_number_of_slots(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that only counts; the 28 tokens are no whole number of chunks."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(
        "trainer.training.loss.where_it_pays",
        lambda function, _: torch.compile(function, backend=counter, dynamic=False),
    )
    for masked in ("one", "a third", "all", "none", "most"):
        p = under(masked)
        sums_of(p, name, 5, int(p["supervised"].sum()))
        sums_of(p, name, 5, None)
    assert counter.frame_count == 1


@pytest.mark.parametrize("masked", ["a third", "most"])
@pytest.mark.parametrize("name", ["data", "kl"])
def test_memory_is_no_more_than_with_all_slots(name: str, masked: str) -> None:
    """But for one chunk of hidden states (and the target's), and the order: logits are what is large."""
    most = []
    for known in (True, False):
        p = problem(32, 4, 4, 5000, torch.float32)
        p["supervised"] = mask(masked).repeat(5, 1)[:32]
        with Ledger(p) as ledger:
            sums_of(p, name, 8, int(p["supervised"].sum()) if known else None).loss.backward()
        most.append(ledger.most)
    assert most[0] <= most[1] + 2 * 8 * 4 * 4 + 128 * 16


def rows_with_little_to_learn() -> Rows:
    """Four rows: one as ever, one with a short answer only, one with none, one that is half padding."""
    rows = pack(documents((24, 24, 24, 13)), 24)
    rows.supervised[1, 6:] = False
    rows.supervised[2] = False
    return rows


def config_of(case: Case, micro: int | None) -> TrainConfig:
    data = dataclasses.replace(case.config.data, row_tokens=case.batch.rows.tokens.shape[1])
    size = case.batch.rows.tokens.numel()
    return dataclasses.replace(case.config, token_budget=size, micro_rows=micro, data=data)


@pytest.mark.parametrize(
    ("labels", "weighting", "per_pass", "replays", "micro"),
    [
        ("data", "decay", None, 1, None),
        ("data", "dpace", 4, 2, 3),
        ("target", "decay", 4, 2, None),
        ("target", "dpace", None, 1, 3),
        ("kl", "decay", 4, 1, 3),
        ("kl", "dpace", None, 2, None),
    ],
)
def test_a_step_that_knows_its_rows_gives_the_same_with_fewer_products(
    makers: Makers, labels: str, weighting: str, per_pass: int | None, replays: int, micro: int | None
) -> None:
    """One row turns out bad on the device; the host does not know, and counts its slots."""
    host = rows_with_little_to_learn()
    objective = {"labels": labels, "weighting": weighting, "replays": replays, "loss_chunk": 4}
    case = Case(makers, LAYERS[1], host, **objective, anchors_per_pass=per_pass, anchors_per_document=9)
    taps = case.batch.states.taps.clone()
    taps[3, 2, 1] = torch.nan
    batch, bad = without_bad_rows(host, dataclasses.replace(case.batch.states, taps=taps))
    assert bad.tolist() == [False, False, False, True]
    config = config_of(case, micro)
    found, products = [], []
    for known in (None, host):
        run = dataclasses.replace(batch, host=known)
        with HeadRows(case.step.head) as seen:
            found.append(case.found(partial(row_gradients, case.step, config, run, 5, slice(0, 4))))
        products.append(seen.back)
    assert found[0][0].weight > 5
    assert_equal(*found)
    wanted = []
    for start in range(0, 4, micro or 4):
        part = slice(start, start + (micro or 4))
        drawn = [draw((4, 24), config.seed, 5, replay)[part] for replay in range(replays)]
        tokens = len(host[part]) * case.step.pass_width * 3
        size = -(-tokens // -(-tokens // 4))
        for uniform in drawn:
            for blocks in case.step.passes(case.step.blocks(host[part], uniform)):
                count = int(blocks.supervised.sum())
                wanted += [size] * max(-(-count // size), 1 if labels == "kl" else 0)
    assert products[1] == wanted
    assert sum(products[1]) < 0.8 * sum(products[0])


def test_the_hosts_count_is_the_devices(makers: Makers) -> None:
    """By a slow loop over the tokens; and what the sums say was counted."""
    host = rows_with_little_to_learn()
    case = Case(makers, LAYERS[0], host, anchors_per_pass=4, anchors_per_document=9)
    uniforms = case.uniforms(3)
    counts = case.step.supervised(host, uniforms)
    assert counts is not None and len({tuple(each) for each in counts}) > 1  # replays differ
    for uniform, found in zip(uniforms, counts, strict=True):
        blocks = case.step.blocks(host, uniform)
        wanted = [0] * case.step.pass_count
        for row in range(4):
            kept = zip(blocks.anchors[row].tolist(), blocks.keep[row].tolist(), strict=True)
            for place, (anchor, keep) in enumerate(kept):
                for at in range(anchor + 1, min(anchor + 4, 24)) if keep else ():
                    same = bool(host.documents[row, at] == host.documents[row, anchor])
                    wanted[place // case.step.pass_width] += same and bool(host.supervised[row, at])
        assert found == wanted
        assert sum(found) == int(case.step.gradients(case.batch, [uniform]).counted.sum()) > 20


def test_a_captured_step_keeps_all_slots(makers: Makers) -> None:
    case = Case(makers, LAYERS[0], rows_with_little_to_learn())
    case.step.execution.mode = "captured"
    assert case.step.supervised(case.batch.rows, case.uniforms(1)) is None


@pytest.mark.parametrize("kept", [True, False], ids=["cached", "fresh"])
def test_a_run_asks_the_head_about_supervised_slots_alone(makers: Makers, kept: bool) -> None:
    """From the data to the products, with states kept and read anew."""
    drafter, target = makers[0](), makers[1]()
    tokens = torch.randint(2, 90, (4, 24), generator=torch.Generator().manual_seed(0))
    rows = from_tokens(tokens, supervised_from=3)
    rows.supervised[1:, 8:] = False
    states = target.states(rows.tokens, rows.positions, rows.documents) if kept else None
    case = Case(makers, LAYERS[0], rows, loss_chunk=2, anchors_per_document=30)
    config = config_of(case, None)
    step = DrafterStep(drafter, target, config, case.step.width)
    data = Dataset(rows, states, {}, 0.0, [])
    work = Colocated(config, step, target, data, lambda number, size: torch.tensor([2, 0, 3, 1]))
    with HeadRows(step.head) as seen:
        sums, _ = work.gradients(0)
    assert sum(seen.back) - int(sums.counted.sum()) in (0, 1)
    assert len(step.blocks(rows, draw((4, 24), 0, 0, 0)).supervised.flatten()) > 2 * sum(seen.back)


def test_parts_and_devices_keep_the_hosts_rows(makers: Makers) -> None:
    case = Case(makers, LAYERS[0], rows_with_little_to_learn())
    batch = Batch(case.batch.rows, case.batch.states, case.batch.rows)
    part = batch.part(slice(1, 3)).to(torch.device("cpu"))
    assert part.host is not None and torch.equal(part.host.tokens, batch.rows.tokens[1:3])
    assert case.batch.part(slice(1, 3)).to(torch.device("cpu")).host is None
