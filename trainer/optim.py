"""AdamW over float32 masters, parameter groups that cover everything once, and the learning rate over the
run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from trainer.config import Optimizer as OptimizerSection
from trainer.config import ParameterGroup, Schedule
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Assigned:
    """One parameter and the group that trains it."""

    name: str
    shape: tuple[int, ...]
    group: ParameterGroup


def assign_groups(
    parameters: Iterable[tuple[str, Tensor]], groups: Sequence[ParameterGroup]
) -> list[Assigned]:
    """Which group trains which parameter.

    Raises:
        ConfigError: a parameter is in no group, or in two; or a group has none.
    """
    where = "train.optimizer.groups"
    assigned = []
    for name, tensor in parameters:
        matching = [group for group in groups if any(fnmatchcase(name, pattern) for pattern in group.match)]
        if len(matching) != 1:
            found = " and ".join(group.name for group in matching) or "no group"
            raise ConfigError(
                f"parameter {name} is in {found}; it must be in exactly one",
                where=where,
                next="mend the patterns under match",
            )
        assigned.append(Assigned(name, tuple(tensor.shape), matching[0]))
    for group in groups:
        if not any(each.group is group for each in assigned):
            raise ConfigError(f"group {group.name} matches no parameter", where=where)
    return assigned


class DrafterOptimizer:
    """One algorithm a group; state and arithmetic are float32 whatever the parameters' dtype.

    A float32 parameter is its own master; for others a float32 copy is trained and written back after each
    step, so that small updates are not lost to rounding.
    """

    def __init__(self, drafter: nn.Module, section: OptimizerSection) -> None:
        named = dict(drafter.named_parameters())
        self.assigned = assign_groups(named.items(), section.groups)
        self.section = section
        self.parameters = [named[each.name] for each in self.assigned]
        self.masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for parameter in self.parameters
        ]
        self.algorithms = [self._algorithm(group) for group in section.groups]

    def _algorithm(self, group: ParameterGroup) -> torch.optim.Optimizer:
        section = self.section
        members = [m for m, each in zip(self.masters, self.assigned, strict=True) if each.group is group]
        if group.algorithm == "adamw":
            return torch.optim.AdamW(
                members,
                lr=section.lr,
                betas=(section.beta1, section.beta2),
                eps=section.eps,
                weight_decay=group.weight_decay,
                fused=True,
            )
        if any(member.ndim != 2 for member in members):
            raise ConfigError(
                f"group {group.name} has parameters that are no matrices; muon is for matrices",
                where="train.optimizer.groups",
            )
        return torch.optim.Muon(
            members,
            lr=section.lr,
            momentum=section.momentum,
            weight_decay=group.weight_decay,
            adjust_lr_fn="match_rms_adamw",  # updates as large as AdamW's: one learning rate fits both
        )

    def state_dict(self) -> dict[str, object]:
        """The moments of every group, by the group's name."""
        return {
            group.name: algorithm.state_dict()
            for group, algorithm in zip(self.section.groups, self.algorithms, strict=True)
        }

    def describe(self) -> list[dict[str, object]]:
        """For print and record: each parameter's group, peak learning rate and weight decay."""
        return [
            {
                "parameter": each.name,
                "shape": list(each.shape),
                "group": each.group.name,
                "algorithm": each.group.algorithm,
                "lr": self.section.lr * each.group.lr_scale,
                "weight_decay": each.group.weight_decay,
            }
            for each in self.assigned
        ]

    def step(self, factor: float, weight: Tensor) -> Tensor:
        """One update from the gradients that the parameters hold, which are then dropped.

        Args:
            factor: of the peak learning rate.
            weight: the sum of weights over all micro-batches (and ranks) that the gradients' sum is divided
            by.
        Returns:
            the gradient's norm before clipping.
        """
        divisor = weight.clamp(min=torch.finfo(torch.float32).tiny)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if master is not parameter:
                master.grad = parameter.grad.float()
                parameter.grad = None
        gradients = [master.grad for master in self.masters if master.grad is not None]
        torch._foreach_div_(gradients, divisor)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.section.clip:
            torch._foreach_mul_(gradients, (self.section.clip / (norm + 1e-6)).clamp(max=1.0))
        for group, algorithm in zip(self.section.groups, self.algorithms, strict=True):
            algorithm.param_groups[0]["lr"] = self.section.lr * group.lr_scale * factor
            algorithm.step()
            algorithm.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        return norm


def lr_factor(schedule: Schedule, step: int, progress: float, warmup_steps: int) -> float:
    """The learning rate over its peak.

    Args:
        step: counted from 0.
        progress: share of the run that is over, 0 to 1: by steps or, when the budget is time, by the clock.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(max(progress, 0.0), 1.0)
    if schedule.kind == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        rest = 1 - schedule.constant_share
        shape = 1.0 if progress <= schedule.constant_share or rest == 0 else (1 - progress) / rest
    return schedule.floor + (1 - schedule.floor) * shape
