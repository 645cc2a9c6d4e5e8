"""Run on a machine with a GPU: pytest -m gpu tests/gpu/test_errors_kernel.py. The loss with its kernel, at
the vocabulary of real targets, beside the plain definition in float64, gradients included."""

from __future__ import annotations

import pytest
import torch

from trainer.training.loss import Kind, head_loss

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
BLOCKS, SLOTS, HIDDEN, WORDS = 5, 15, 512, 151_936


@pytest.mark.parametrize("teacher", [False, True])
def test_loss_and_gradient_at_a_large_vocabulary(gpus: int, teacher: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    size = (BLOCKS, SLOTS)
    make = {"device": "cuda", "generator": generator}
    hidden = torch.randn(*size, HIDDEN, **make).bfloat16().requires_grad_()  # type: ignore[arg-type]
    head = (0.1 * torch.randn(WORDS, HIDDEN, **make)).bfloat16()  # type: ignore[arg-type]
    labels = torch.randint(WORDS, size, **make)  # type: ignore[call-overload]
    weights, alive = torch.rand(size, **make), torch.rand(size, **make) < 0.8  # type: ignore[arg-type]
    weights = weights * alive
    states = torch.randn(*size, HIDDEN, **make).bfloat16() if teacher else None  # type: ignore[arg-type]
    sums = head_loss(hidden, head, labels, weights, alive, Kind(), states, chunk=32)
    sums.loss.backward()
    if states is not None:
        labels = (states @ head.T).argmax(-1)
    exact = hidden.detach().double().requires_grad_()
    log_p = (exact @ head.double().T).log_softmax(-1)
    loss = -(weights * log_p.gather(-1, labels[..., None])[..., 0]).sum()
    loss.backward()
    assert exact.grad is not None and hidden.grad is not None
    assert abs(float(sums.loss) / float(loss) - 1) < 2e-3
    assert (hidden.grad.double() - exact.grad).norm() < 1e-2 * exact.grad.norm()
    right = ((hidden.detach() @ head.T).argmax(-1) == labels) & alive
    assert sums.correct.tolist() == right.sum(0).tolist()
