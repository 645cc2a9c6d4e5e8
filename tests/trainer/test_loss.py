"""The chunked head loss against plain autograd, and sums that do not care how a batch is cut.

Run: python -m pytest tests/trainer/test_loss.py
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.training.loss import Kind, _errors, head_loss
from trainer.training.objective import dpace_weights


def problem(
    blocks: int, slots: int, hidden: int, words: int, dtype: torch.dtype, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    supervised = torch.rand(blocks, slots, generator=generator) < 0.7
    return {
        "hidden": normal(blocks, slots, hidden).requires_grad_(),
        "head": normal(words, hidden),
        "labels": torch.randint(words, (blocks, slots), generator=generator),
        "weights": torch.rand(blocks, slots, generator=generator) * supervised,
        "supervised": supervised,
        "teacher": normal(blocks, slots, hidden),
    }


def plain(p: dict[str, Tensor], kind: Kind, teacher: bool) -> tuple[Tensor, Tensor]:
    """The same loss as anybody would write it: all logits at once, autograd for the gradient."""
    logits = p["hidden"] @ p["head"].T
    labels = p["labels"]
    wanted = (p["teacher"] @ p["head"].T) if teacher else None
    if wanted is not None:
        labels = wanted.argmax(-1)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    weights = p["weights"]
    if kind.dpace_alpha is not None:
        weights = dpace_weights((-each).exp(), p["supervised"], kind.dpace_alpha)
    if kind.kl and wanted is not None:
        pointwise = F.kl_div(
            logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none"
        )
        each = pointwise.sum(-1)
    return (weights * each).sum(), weights.sum()


KINDS = {
    "data": (Kind(), False),
    "dpace": (Kind(dpace_alpha=0.4), False),
    "target": (Kind(), True),
    "kl": (Kind(kl=True), True),
    "kl with dpace": (Kind(dpace_alpha=0.4, kl=True), True),
}


@pytest.mark.parametrize("chunk", [1, 3, 9, 100])
@pytest.mark.parametrize("name", KINDS)
def test_sums_and_gradients_equal_plain_autograd(name: str, chunk: int) -> None:
    kind, teacher = KINDS[name]
    p = problem(7, 4, 6, 50, torch.float64)
    wanted_loss, wanted_weight = plain(p, kind, teacher)
    (wanted,) = torch.autograd.grad(wanted_loss, p["hidden"])
    given = p["teacher"] if teacher else None
    sums = head_loss(p["hidden"], p["head"], p["labels"], p["weights"], p["supervised"], kind, given, chunk)
    (got,) = torch.autograd.grad(3.0 * sums.loss, p["hidden"])
    assert torch.allclose(sums.loss, wanted_loss) and torch.allclose(sums.weight, wanted_weight.double())
    assert torch.allclose(got, 3.0 * wanted, atol=1e-12)


@pytest.mark.parametrize("name", ["data", "kl"])
def test_a_vocabulary_of_248320_words_in_double_precision(name: str) -> None:
    kind, teacher = KINDS[name]
    p = problem(3, 2, 4, 248_320, torch.float64)
    wanted_loss, _ = plain(p, kind, teacher)
    (wanted,) = torch.autograd.grad(wanted_loss, p["hidden"])
    given = p["teacher"] if teacher else None
    sums = head_loss(p["hidden"], p["head"], p["labels"], p["weights"], p["supervised"], kind, given, 2)
    (got,) = torch.autograd.grad(sums.loss, p["hidden"])
    assert torch.allclose(sums.loss, wanted_loss, rtol=1e-12)
    assert torch.allclose(got, wanted, rtol=1e-10, atol=1e-14)


def test_lower_precision_stays_close() -> None:
    p = problem(16, 5, 64, 3000, torch.float32)
    exact = {k: v.detach().double() if v.is_floating_point() else v for k, v in p.items()}
    exact["hidden"].requires_grad_()
    loss, _ = plain(exact, Kind(), False)
    (wanted,) = torch.autograd.grad(loss, exact["hidden"])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        hidden = p["hidden"].detach().to(dtype).requires_grad_()
        sums = head_loss(hidden, p["head"].to(dtype), p["labels"], p["weights"], p["supervised"], Kind())
        (got,) = torch.autograd.grad(sums.loss, hidden)
        assert got.dtype == dtype and sums.loss.dtype == torch.float32
        assert (got.double() - wanted).norm() / wanted.norm() < tolerance


def test_counts_by_a_slow_loop() -> None:
    p = problem(9, 4, 6, 20, torch.float32)
    best = (p["hidden"] @ p["head"].T).argmax(-1)
    p["labels"][:6] = best[:6]  # most blocks are foretold fully
    sums = head_loss(p["hidden"], p["head"], p["labels"], p["weights"], p["supervised"], Kind())
    correct, counted, prefix, blocks = [0] * 4, [0] * 4, 0, 0
    for block in range(9):
        going = True
        blocks += bool(p["supervised"][block, 0])
        for slot in range(4):
            alive = bool(p["supervised"][block, slot])
            right = alive and bool(best[block, slot] == p["labels"][block, slot])
            counted[slot] += alive
            correct[slot] += right
            going = going and right
            prefix += going
    assert sums.correct.tolist() == correct and sums.counted.tolist() == counted
    assert sums.prefix.item() == prefix and sums.blocks.item() == blocks
    assert prefix > 5


class Ledger(TorchDispatchMode):
    """Counts matrix products, and the bytes that tensors made inside hold at once, by their storages."""

    def __init__(self, given: dict[str, Tensor]) -> None:
        super().__init__()
        self.products, self.now, self.most = 0, 0, 0
        # Storage -> living tensors on it; those that were there before are nobody's new memory.
        self.tensors = {tensor.untyped_storage()._cdata: 1 for tensor in given.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm)
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, Tensor):
                storage = part.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if self.tensors.setdefault(key, 0) == 0:
                    self.now += size
                    self.most = max(self.most, self.now)
                self.tensors[key] += 1
                weakref.finalize(part, self.gone, key, size)
        return out

    def gone(self, key: int, size: int) -> None:
        self.tensors[key] -= 1
        if self.tensors[key] == 0:
            self.now -= size


def used(p: dict[str, Tensor], kind: Kind, teacher: bool, chunk: int) -> Ledger:
    """Of the loss and its backward pass."""
    p["hidden"].grad = None
    with Ledger(p) as ledger:
        given = p["teacher"] if teacher else None
        head_loss(
            p["hidden"], p["head"], p["labels"], p["weights"], p["supervised"], kind, given, chunk
        ).loss.backward()
    return ledger


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_that_of_one_chunk_however_many_tokens(name: str) -> None:
    kind, teacher = KINDS[name]
    hidden, words, chunk = 4, 20_000, 8
    logits = chunk * words * 4
    few, many = (
        used(problem(blocks, 4, hidden, words, torch.float32), kind, teacher, chunk).most
        for blocks in (2, 128)
    )
    assert logits <= few <= many < (3.2 if kind.kl else 2.2) * logits  # all tokens' would be 64 chunks'
    assert many - few < 20 * 4 * 128 * 4 * hidden  # what grows are rows of H numbers


@pytest.mark.parametrize("name", KINDS)
def test_two_products_a_chunk_and_none_in_the_backward_pass(name: str) -> None:
    """A third one for the target's logits where those are wanted."""
    kind, teacher = KINDS[name]
    assert used(problem(6, 4, 5, 30, torch.float32), kind, teacher, 6).products == 4 * (3 if teacher else 2)


@pytest.mark.parametrize("name", KINDS)
def test_the_part_that_a_gpu_compiles_is_compiled_once_for_all_batches(name: str) -> None:
    """With a compiler that only counts: no break, no second compilation, the same numbers."""
    kind, teacher = KINDS[name]
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(_errors, backend=counter, dynamic=False, fullgraph=True)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        logits, wanted = (torch.randn(5, 30, generator=generator) for _ in range(2))
        arguments = torch.arange(5), wanted if teacher else None, kind.kl
        got, eager = compiled(logits.clone(), *arguments), _errors(logits.clone(), *arguments)
        assert all(torch.allclose(*pair) for pair in zip(got, eager, strict=True))
    assert counter.frame_count == 1


def test_only_the_loss_carries_a_gradient() -> None:
    p = problem(3, 2, 4, 10, torch.float32)
    sums = head_loss(p["hidden"], p["head"], p["labels"], p["weights"], p["supervised"], Kind())
    assert sums.loss.requires_grad
    assert not sums.weight.requires_grad and not sums.correct.requires_grad and not sums.prefix.requires_grad
