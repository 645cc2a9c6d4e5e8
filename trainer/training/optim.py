"""An optimizer step over float32 masters: averaging, clipping and one algorithm for each parameter group.

A step with a non-finite gradient changes nothing: no weight, no moment, no step count. Whether it is one is
decided where the gradient is and never read by the host, which learns of it later (bad_steps.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.sections import Optimizer as OptimizerSection
from trainer.sections import ParameterGroup
from trainer.training.adamw import AdamW
from trainer.training.groups import assign_groups

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Share:
    """One of `size` equal parts of all parameters, laid end to end; the last may be shorter."""

    rank: int
    size: int

    def length(self, total: int) -> int:
        return -(-total // self.size)

    def cuts(self, counts: Sequence[int]) -> list[slice]:
        """Which of each parameter's elements are in it; counts: of elements."""
        length = self.length(sum(counts))
        begin, end, at, found = self.rank * length, (self.rank + 1) * length, 0, []
        for count in counts:
            found.append(slice(*(min(max(edge - at, 0), count) for edge in (begin, end))))
            at += count
        return found


class Owners(Protocol):
    """The ranks that own a share each."""

    def add(self, value: Tensor) -> None:
        """Replace a value by its sum over all of them."""

    def whole(self, pieces: Sequence[Tensor], what: str) -> list[Tensor]:
        """Every parameter's values, each owner giving its pieces; good until the next call or gradients."""


class DrafterOptimizer:
    """One algorithm a group; state and arithmetic are float32 whatever the parameters' dtype.

    A float32 parameter is its own master; for others a float32 copy is trained and written back after each
    step, so that small updates are not lost to rounding. All that a step reads lies in tensors that stay
    where they are, so a CUDA graph can hold it: the learning rates, too, are filled in.

    With a `share`, masters and moments are of this share alone (pieces of one dimension, some of them empty):
    only these weights are updated here, from gradients that need be there only for them. Whoever made it then
    sets `owners`, who know the norm of the whole gradient.
    """

    def __init__(self, drafter: nn.Module, section: OptimizerSection, share: Share | None = None) -> None:
        """Raises ConfigError: the groups do not fit the parameters, or the share."""
        named = dict(drafter.named_parameters())
        self.assigned = assign_groups(named.items(), section.groups)
        self.section, self.share = section, share
        self.owners: Owners | None = None
        self.parameters = [named[each.name] for each in self.assigned]
        if share is not None:
            self._check_share()
            self.cuts = share.cuts([parameter.numel() for parameter in self.parameters])
        self.masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for parameter in map(self.piece, range(len(self.parameters)), self.parameters)
        ]
        self.algorithms = [self._algorithm(group) for group in section.groups]

    def _check_share(self) -> None:
        reason = unshareable(self.section)
        if reason is None and any(parameter.dtype != torch.float32 for parameter in self.parameters):
            reason = "masters apart from the weights are not shared out"
        if reason is not None:
            raise ConfigError(
                f"the optimizer cannot be shared out: {reason}",
                where="train.layout.shard_optimizer",
                next="say auto or off",
            )

    def piece(self, number: int, whole: Tensor) -> Tensor:
        """Of something shaped as parameter `number`, what is here."""
        if self.share is None:
            return whole
        return whole.detach().reshape(-1)[self.cuts[number]].requires_grad_()

    def _algorithm(self, group: ParameterGroup) -> torch.optim.Optimizer:
        section = self.section
        members = [m for m, each in zip(self.masters, self.assigned, strict=True) if each.group is group]
        if group.algorithm == "adamw":
            device = members[0].device
            return AdamW(
                members,
                lr=torch.tensor(section.lr, device=device),  # float32, as the weights are
                capturable=device.type == "cuda",
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

    @property
    def capturable(self) -> bool:
        """Whether an update reads nothing from the host, as Muon's learning rate, nor from other ranks."""
        return self.share is None and all(
            isinstance(algorithm, torch.optim.AdamW) for algorithm in self.algorithms
        )

    def held(self) -> dict[str, Tensor]:
        """All that an update reads and changes, gradients aside, by name."""
        found: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        for each, parameter, master in zip(self.assigned, self.parameters, self.masters, strict=True):
            names[id(master)] = each.name
            found[each.name] = parameter.detach()
            if master is not parameter:
                found[f"the master of {each.name}"] = master.detach()
        for group, algorithm in zip(self.section.groups, self.algorithms, strict=True):
            rate = algorithm.param_groups[0]["lr"]
            if isinstance(rate, Tensor):
                found[f"the rate of {group.name}"] = rate
            for master, state in algorithm.state.items():
                found.update({f"{key} of {names[id(master)]}": value for key, value in state.items()})
        return found

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

    def step(
        self,
        factor: float,
        weight: Tensor,
        update: Callable[[DrafterOptimizer, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """One update from the gradients that the parameters hold, which are then dropped.

        Args:
            factor: of the peak learning rate.
            weight: the sum of weights over all micro-batches (and ranks) that the gradients' sum is divided
            by.
            update: how it is run, as `Execution.update`; None: eagerly.
        Returns:
            the gradient's norm before clipping; where it is not finite, nothing was updated.
        """
        self.set_rates(factor)
        norm = self.update(weight) if update is None else update(self, weight)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = master.grad = None
        return norm

    def set_rates(self, factor: float) -> None:
        """Learning rates of the next update. AdamW's stay where they are, Muon's are the host's anyway."""
        for group, algorithm in zip(self.section.groups, self.algorithms, strict=True):
            rate, held = self.section.lr * group.lr_scale * factor, algorithm.param_groups[0]
            if isinstance(held["lr"], Tensor):
                held["lr"].fill_(rate)
            else:
                held["lr"] = rate

    def update(self, weight: Tensor) -> Tensor:
        """What the device does in a step: no value is read back, no gradient dropped. See `step`.

        The gradients are read twice: for the norm of their undivided sums, and by the update, which divides
        as it reads. Averaging and clipping are one divisor; Muon, which takes none, gets it beforehand.
        """
        for number, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if master is not parameter:
                master.grad = self.piece(number, parameter.grad).detach().float()
        divisor = weight.float().clamp(min=torch.finfo(torch.float32).tiny)
        gradients = [master.grad for master in self.masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.owners is not None:
            square = norm.double() ** 2
            self.owners.add(square)
            norm = square.sqrt().float()
        norm = norm / divisor
        if self.section.clip:
            divisor = divisor / (self.section.clip / (norm + 1e-6)).clamp(max=1.0)
        bad = ~norm.isfinite()
        for algorithm in self.algorithms:
            if isinstance(algorithm, AdamW):
                # What a GradScaler tells its optimizer: the fused update divides by the one, and leaves all
                # as it is where the other is not 0.
                algorithm.grad_scale, algorithm.found_inf = divisor, bad.float()
                algorithm.step()
            else:
                _step_unless(bad, divisor, algorithm)
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter and self.share is None:  # a share's pieces are the weights' memory
                    parameter.copy_(master)
        return norm


def trained_bytes(optimizer: DrafterOptimizer) -> tuple[int, int]:
    """(weights, moments) of all parameters, in bytes: AdamW keeps two moments a weight, Muon one."""
    weights = moments = 0
    for each in optimizer.assigned:
        weights += FLOAT32 * math.prod(each.shape)
        moments += FLOAT32 * math.prod(each.shape) * (2 if each.group.algorithm == "adamw" else 1)
    return weights, moments


def unshareable(section: OptimizerSection) -> str | None:
    """Why the optimizer's state cannot be shared out over ranks, if it cannot."""
    muon = [group.name for group in section.groups if group.algorithm == "muon"]
    return f"group {muon[0]} is Muon's, which needs whole matrices" if muon else None


@torch.no_grad()
def _step_unless(bad: Tensor, divisor: Tensor, algorithm: torch.optim.Optimizer) -> None:
    """A step of Muon, which knows no `grad_scale` and no `found_inf`, undone on the device where `bad`.

    The momentum moves towards the gradient, so it stays if that is the momentum itself; the weights are kept
    aside.
    """
    members = [member for group in algorithm.param_groups for member in group["params"]]
    before = [member.clone() for member in members]
    torch._foreach_div_([member.grad for member in members if member.grad is not None], divisor)
    for member in members:
        held = algorithm.state[member].get("momentum_buffer") if member in algorithm.state else None
        member.grad = torch.where(bad, torch.zeros_like(member) if held is None else held, member.grad)
    algorithm.step()
    for member, old in zip(members, before, strict=True):
        member.copy_(torch.where(bad, old, member))
