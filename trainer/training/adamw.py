"""torch's AdamW with our own update on a GPU, which keeps the weights' twins up to date (adamw_kernel.py).

State, groups and what is saved are torch's. Where the kernel cannot run, torch's fused update does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.model.gpu_kernels import run_here
from trainer.training.twins import keeps_up, twin_of

BLOCK = 1024
WARPS = 8
LEAST = 1 << 21  # elements of a tensor, on average: a launch for each costs more time than it saves below


class AdamW(torch.optim.AdamW):
    """One group; told of divisor and bad steps as a GradScaler tells: `grad_scale`, `found_inf`."""

    grad_scale: Tensor
    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        members = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        if _pays(members) and all(_fits(each) and _fits(each.grad) for each in members):
            self.by_kernel(members)
            return
        super().step(closure)
        torch.autograd.graph.increment_version(members)  # torch's fused update does not count as a change

    def by_kernel(self, members: list[Tensor]) -> None:
        """The update of all members, each by one launch. Counts stay where the step is bad."""
        group = self.param_groups[0]
        for each in members:
            if not self.state[each]:
                self.state[each] = {
                    "step": torch.zeros((), dtype=torch.float32, device=each.device),
                    "exp_avg": torch.zeros_like(each),
                    "exp_avg_sq": torch.zeros_like(each),
                }
        counts = [self.state[each]["step"] for each in members]
        if counts:
            torch._foreach_add_(counts, 1)
            torch._foreach_sub_(counts, [self.found_inf] * len(counts))
        for each in members:
            # Triton launches on the thread's device, whatever the tensors' is.
            with torch.cuda.device_of(each):
                update(each, self.state[each], group, self.grad_scale, self.found_inf)


def update(
    weight: Tensor, state: dict[str, Tensor], group: dict[str, Any], divisor: Tensor, bad: Tensor
) -> None:
    """One tensor's, on its own GPU; its twin, moments and versions with it.

    Args:
        state: its step count, already that of this update, and moments, as torch's AdamW names them.
        divisor, bad: one number each, on that GPU: of the gradient, and whether nothing may change.
    """
    from trainer.training import adamw_kernel

    assert weight.grad is not None
    twin, (beta1, beta2) = twin_of(weight), group["betas"]
    adamw_kernel.update[(-(-weight.numel() // BLOCK),)](
        *(weight, weight.grad, state["exp_avg"], state["exp_avg_sq"], weight if twin is None else twin),
        *(group["lr"], state["step"], divisor, bad),
        *(1 - beta1, 1 - beta2, math.log2(beta1), math.log2(beta2), group["eps"], group["weight_decay"]),
        weight.numel(),
        BLOCK=BLOCK,
        TWIN=twin is not None,
        num_warps=WARPS,
    )
    torch.autograd.graph.increment_version((weight, state["exp_avg"], state["exp_avg_sq"]))
    if twin is not None:
        keeps_up(weight)


def _pays(members: list[Tensor]) -> bool:
    return sum(each.numel() for each in members) >= LEAST * len(members)


def _fits(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous() and run_here()
