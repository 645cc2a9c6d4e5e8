"""Cross-entropy (or KL) through the frozen head, without keeping the logits.

Only slots 1..B-1 reach the head. The gradient with respect to the hidden states is formed chunk by chunk in
the forward pass, while the chunk's logits are there: the head is frozen, so two matrix products do (logits,
and their gradient times the head), and memory is one chunk's logits. Sums are returned, not means, so that
micro-batches and ranks add up before anything is divided.

Blocks M, slots B-1 = L, hidden H, vocabulary V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.objective import dpace_weights

CHUNK_LOGITS = 1 << 26  # logits of one chunk: 256 MiB in float32


@dataclass(frozen=True)
class Sums:
    """Sums over the blocks of a batch. All but `loss` are detached."""

    loss: Tensor  # sum of weight * loss
    weight: Tensor  # sum of weights
    correct: Tensor  # [L] slots whose most likely token is the label
    counted: Tensor  # [L] supervised slots
    prefix: Tensor  # labels foretold before the first miss, over all blocks
    blocks: Tensor  # blocks with a supervised first slot

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Kind:
    """What is minimised.

    Slots are weighted by the weights given, or by D-PACE with this alpha. With a teacher the labels are its
    most likely tokens, and the loss is their cross-entropy or, with `kl`, KL(target || drafter).
    """

    dpace_alpha: float | None = None
    kl: bool = False


class _HeadLoss(torch.autograd.Function):
    """(hidden, ...) -> (loss, weight, correct, counted, prefix, blocks); gradient for `hidden` only."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        supervised: Tensor,
        teacher: Tensor | None,
        kind: Kind,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        blocks, slots, _ = hidden.shape
        kl = kind.kl and teacher is not None
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        gradient = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        zero = torch.zeros((), dtype=wide, device=hidden.device)
        loss, weight, prefix, started = zero, zero, zero, zero
        correct = torch.zeros(slots, dtype=wide, device=hidden.device)
        counted = torch.zeros(slots, dtype=wide, device=hidden.device)
        for start in range(0, blocks, chunk):
            part = slice(start, min(start + chunk, blocks))
            label, alive = labels[part], supervised[part]
            if teacher is not None:
                wanted = (teacher[part] @ head.T).to(wide)
                label = wanted.argmax(-1)
            log_p = (hidden[part] @ head.T).to(wide).log_softmax(-1)  # [m, L, V]
            own = log_p.gather(-1, label[..., None])[..., 0]
            right = (log_p.argmax(-1) == label) & alive
            value = -own
            if kl:
                wanted = wanted.log_softmax(-1)
                value = (wanted.exp() * (wanted - log_p)).sum(-1)
            if kind.dpace_alpha is None:
                weight_here = weights[part].to(wide)
            else:
                weight_here = dpace_weights(own.exp(), alive, kind.dpace_alpha)
            loss = loss + (weight_here * value).sum()
            weight = weight + weight_here.sum()
            correct = correct + right.sum(0)
            counted = counted + alive.sum(0)
            prefix = prefix + right.long().cumprod(-1).sum()
            started = started + alive[:, 0].sum()
            # The gradient of the logits: softmax minus what is wanted, a distribution or one label. The
            # weight is applied after the product, to a row of H numbers instead of one of V.
            difference = log_p.exp_()
            if kl:
                difference -= wanted.exp()
            else:
                minus_one = torch.full_like(own, -1.0)[..., None]
                difference.scatter_add_(-1, label[..., None], minus_one)
            gradient[part] = (difference.to(head.dtype) @ head) * weight_here[..., None].to(hidden.dtype)
        ctx.save_for_backward(gradient)
        return loss, weight, correct, counted, prefix, started

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0].to(gradient.dtype), *[None] * 7)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    supervised: Tensor,
    kind: Kind,
    teacher: Tensor | None = None,
    chunk: int | None = None,
) -> Sums:
    """Weighted loss sums of drafted slots.

    Args:
        hidden: [M, L, H] the drafter's states of slots 1..B-1, in the head's dtype.
        head: [V, H], frozen.
        labels, supervised: [M, L]; labels where unsupervised are any valid id.
        weights: [M, L] decay weights, 0 where unsupervised; D-PACE takes its own.
        teacher: [M, L, H] the target's final states that predict the labels; then the loss is KL(target ||
        drafter).
        chunk: blocks a chunk.
    """
    if chunk is None:
        chunk = max(1, CHUNK_LOGITS // (head.shape[0] * hidden.shape[1]))
    loss, *others = _HeadLoss.apply(hidden, head, labels, weights, supervised, teacher, kind, chunk)
    return Sums(loss, *(other.detach() for other in others))
