"""Cross-entropy (or KL) through the frozen head, without keeping the logits.

Only slots 1..B-1 reach the head. Chunk by chunk of tokens, each token's loss and its gradient with respect to
the token's hidden state are formed while the chunk's logits are there. The head is frozen, so two matrix
products do (logits, and their gradient times the head), none is repeated in the backward pass, and what stays
is a row of H numbers a token and one to multiply it by. The same pass says whether the most likely token is
the label. Weights come after, as ordinary arithmetic on the losses: D-PACE needs all of a block's slots
first. Sums are returned, not means, so that micro-batches and ranks add up before anything is divided.

Where the host knows how many slots are supervised, only as many chunks are done as they fill. The device puts
them first, and a chunk has the same number of tokens whatever the data: nobody waits for the device, nothing
is compiled again, and memory is given out in the same pieces.

Blocks M, slots B-1 = L, tokens T = M * L, hidden H, vocabulary V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.model.compiled import where_it_pays
from trainer.model.gpu_kernels import run_here
from trainer.training.objective import dpace_weights

CPU_LOGITS = 1 << 26  # of one chunk: 256 MiB in float32
KERNEL_DTYPES = (torch.bfloat16, torch.float32)  # float16 has not the range that errors_kernel writes in
GPU_SHARE = 1 / 32  # of a GPU's memory for one chunk's logits: products of many rows waste no part of it


def chunk_tokens(device: torch.device, vocabulary: int, dtype: torch.dtype, teacher: bool) -> int:
    """Tokens whose logits are held at once. With a teacher there are two sets of logits and, for KL, float32
    copies: a quarter of the tokens then.
    """
    logits = CPU_LOGITS
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        logits = int(GPU_SHARE * total / dtype.itemsize) // (4 if teacher else 1)
    return max(1, logits // vocabulary)


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

    def to(self, device: torch.device) -> Sums:
        return Sums(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Kind:
    """What is minimised.

    Slots are weighted by the weights given, or by D-PACE with this alpha. With a teacher the labels are its
    most likely tokens, and the loss is their cross-entropy or, with `kl`, KL(target || drafter).
    """

    dpace_alpha: float | None = None
    kl: bool = False


def _errors(
    logits: Tensor, label: Tensor, wanted: Tensor | None, kl: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(d loss / d logits, loss, log-probability of the label, most likely token is the label) of c tokens.

    Three tensors of the size of the logits are held at most, two without the target's. Compiled on a GPU.

    Args:
        logits, wanted: [c, V], the drafter's and, where those are wanted, the target's.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    dtype, logits = logits.dtype, logits.to(wide)
    if wanted is not None:
        wanted = wanted.to(wide)
        label = wanted.argmax(-1)
        wanted = wanted.log_softmax(-1) if kl else None
    right = logits.argmax(-1) == label
    log_p = logits.log_softmax(-1)
    del logits
    own = log_p.gather(-1, label[:, None])[:, 0]
    # The gradient is softmax minus what is wanted: a distribution, or one label.
    if wanted is None:
        difference = log_p.exp_()
        difference.scatter_add_(-1, label[:, None], -torch.ones_like(own)[:, None])
        return difference.to(dtype), -own, own, right
    p = wanted.exp()
    loss = wanted.sub_(log_p).mul_(p).sum(-1)
    return log_p.exp_().sub_(p).to(dtype), loss, own, right


def _chunk(
    hidden: Tensor, head: Tensor, label: Tensor, teacher: Tensor | None, kl: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_errors` of c tokens' logits, which nobody else holds, as quickly as they can be had.

    Args:
        hidden, teacher: [c, H].
    Returns:
        what `_errors` does; behind the first, [c], what is left to multiply its rows by.
    """
    if kl or not hidden.is_cuda or hidden.dtype not in KERNEL_DTYPES or not run_here():
        errors, loss, own, right = where_it_pays(_errors, hidden)(
            hidden @ head.T, label, None if teacher is None else teacher @ head.T, kl
        )
        return errors, torch.ones_like(loss), loss, own, right
    from trainer.training.errors_kernel import errors_in_place

    if teacher is not None:
        label = (teacher @ head.T).argmax(-1)
    logits = hidden @ head.T
    scale, loss, right = errors_in_place(logits, label)
    return logits, scale, loss, -loss, right


class _TokenLoss(torch.autograd.Function):
    """(hidden, ...) -> (loss, log-probability of the label, most likely token is the label), all [T].

    The first carries a gradient, for `hidden` alone. Tokens are taken in the order of `order` [T], or as they
    come, as many chunks of `size` tokens as are wanted; the last of all reaches back over a few that the one
    before has done. Tokens that are not taken get zeros. No tensor's size depends on the number of chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        kl: bool,
        size: int,
        chunks: int,
        order: Tensor | None,
    ) -> tuple[Tensor, ...]:
        gradient = torch.empty_like(hidden)
        loss = hidden.new_zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        own, right = torch.zeros_like(loss), torch.zeros_like(loss, dtype=torch.bool)
        scale = torch.ones_like(loss)
        for number in range(chunks):
            start = min(number * size, len(hidden) - size)
            part = slice(start, start + size)
            at = part if order is None else order[part]
            errors, scale[at], loss[at], own[at], right[at] = _chunk(
                hidden[at], head, labels[at], None if teacher is None else teacher[at], kl
            )
            torch.mm(errors, head, out=gradient[part])
            del errors  # before the next chunk's logits come
        if order is not None:
            done = slice(chunks * size)
            gradient = torch.zeros_like(hidden).index_copy_(0, order[done], gradient[done])
        ctx.save_for_backward(gradient, scale)
        ctx.mark_non_differentiable(own, right)
        return loss, own, right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, scale = ctx.saved_tensors
        # Into the gradient's own dtype at once: no wider copy of all hidden states on the way.
        return torch.mul(gradient, (grads[0] * scale)[:, None], out=torch.empty_like(gradient)), *[None] * 7


def cut(tokens: int, chunk: int, most: int | None = None, compiles: bool = False) -> tuple[int, int]:
    """(tokens of every chunk, how many chunks), the first whatever `most` is.

    Args:
        chunk: the most tokens of one chunk.
        most: no more tokens than these need be done; None: all.
        compiles: at least one chunk, so that the first batch compiles it and not a later one.
    """
    chunks = -(-tokens // chunk)
    size = -(-tokens // chunks)
    return size, chunks if most is None else min(max(-(-most // size), int(compiles)), chunks)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    supervised: Tensor,
    kind: Kind,
    teacher: Tensor | None = None,
    chunk: int | None = None,
    most: int | None = None,
) -> Sums:
    """Weighted loss sums of drafted slots.

    Args:
        hidden: [M, L, H] the drafter's states of slots 1..B-1, in the head's dtype.
        head: [V, H], frozen.
        labels, supervised: [M, L]; labels where unsupervised are any valid id.
        weights: [M, L] decay weights, 0 where unsupervised; D-PACE takes its own.
        teacher: [M, L, H] the target's final states that predict the labels, and then give them.
        chunk: tokens whose logits are held at once.
        most: no more slots than these are supervised, as the host knows; None: it does not.
    """
    if chunk is None:
        chunk = chunk_tokens(hidden.device, head.shape[0], head.dtype, teacher is not None)
    flat = None if teacher is None else teacher.flatten(0, 1)
    size, chunks = cut(labels.numel(), chunk, most, compiles=kind.kl)
    order = None
    if chunks * size < labels.numel():
        # The supervised ones, then dead ones, which fill the last chunk; each among its like in its place.
        order = (~supervised).flatten().byte().argsort(stable=True)
    each = _TokenLoss.apply(hidden.flatten(0, 1), head, labels.flatten(), flat, kind.kl, size, chunks, order)
    loss, own, right = (part.view(labels.shape) for part in each)
    if kind.dpace_alpha is not None:
        weights = dpace_weights(own.exp(), supervised, kind.dpace_alpha)
    weights, right = weights.to(loss.dtype), right & supervised
    return Sums(
        loss=(weights * loss).sum(),
        weight=weights.sum(),
        correct=right.sum(0).to(loss.dtype),
        counted=supervised.sum(0).to(loss.dtype),
        prefix=right.long().cumprod(-1).sum().to(loss.dtype),
        blocks=supervised[:, 0].sum().to(loss.dtype),
    )
