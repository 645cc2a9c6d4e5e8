"""What the drafter is asked: anchors, labels, weights. Fixed shapes; nothing is read back from the device.

A block starts at an anchor, a token that the target itself has produced. Slot 0 holds the anchor, slots
1..B-1 hold the mask token; slot k predicts the token at anchor + k (no shift), weighted by exp(-(k-1)/gamma),
because a slot only counts once all slots before it were right (DFlash, arXiv 2602.06036, section 4.2).

Rows R, row tokens S, anchors a row N, block size B.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainer.data.anchors import valid_anchors
from trainer.data.packing import Rows


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch."""

    anchors: Tensor  # [R, N] index in the row, rising; 0 where dead
    keep: Tensor  # [R, N] bool
    labels: Tensor  # [R, N, B-1] the data's tokens at anchor + 1 .. anchor + B - 1; 0 where unsupervised
    label_index: Tensor  # [R, N, B-1] where in the row those tokens are, clamped to the row
    supervised: Tensor  # [R, N, B-1] bool
    weights: Tensor  # [R, N, B-1] decay weights, 0 where unsupervised
    positions: Tensor  # [R, N * B] the slots' positions in their documents, for RoPE
    tokens: Tensor  # [R, N * B] anchor, mask, mask, ...

    def part(self, places: slice) -> Blocks:
        """The blocks at these places of every row."""
        rows, count = self.anchors.shape

        def cut(values: Tensor) -> Tensor:
            by_block = values.view(rows, count, -1)[:, places]
            return by_block if values.dim() == 3 else by_block.flatten(1)

        return Blocks(**{each.name: cut(getattr(self, each.name)) for each in fields(self)})


def draw(shape: tuple[int, int], seed: int, batch: int, replay: int) -> Tensor:
    """Uniform numbers [R, S] float64 that depend on (run seed, batch, replay) alone, on any device.

    Drawn for the whole batch at once, so slicing it into micro-batches or over ranks changes no anchor.
    """
    key = hashlib.blake2b(f"{seed}/{batch}/{replay}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def choose_anchors(rows: Rows, uniform: Tensor, per_document: int, width: int) -> tuple[Tensor, Tensor]:
    """Anchors, each document's share drawn uniformly without replacement.

    A document gets min(per_document, its valid anchors). When a row's total exceeds `width`, documents give
    up their last-drawn anchors first, so short documents do not starve.

    Args:
        uniform: [R, S] from `draw`.
    Returns:
        anchors [R, width], rising along the row, 0 where dead; keep [R, width].
    """
    valid = valid_anchors(rows)
    size = rows.tokens.shape[1]
    index = torch.arange(size, device=rows.tokens.device).expand_as(rows.tokens)
    # Sorting by (document, random) leaves each document in its place and shuffles it, valid tokens in front.
    within = torch.where(valid, 0.5 * uniform, 0.75)
    order = (rows.documents + within).argsort(dim=1, stable=True)  # equal numbers: alike on any device
    # The place in the sorted row minus the document's start is the draw's rank in its document.
    rank = torch.empty_like(index).scatter_(1, order, index) - rows.doc_start
    wanted = valid & (rank < per_document)
    priority = torch.where(wanted, rank + uniform, torch.inf)
    taken = priority.argsort(dim=1, stable=True)[:, :width]
    keep = priority.gather(1, taken).isfinite()
    anchors, by_index = torch.where(keep, taken, size).sort(dim=1)
    keep = keep.gather(1, by_index)
    short = width - anchors.shape[1]
    if short > 0:  # more anchors wanted than the row has tokens
        anchors = torch.nn.functional.pad(anchors, (0, short), value=size)
        keep = torch.nn.functional.pad(keep, (0, short), value=False)
    return torch.where(keep, anchors, 0), keep


def decay(block_size: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """[B-1] weights of slots 1 to B-1."""
    return torch.exp(-torch.arange(block_size - 1, device=device, dtype=torch.float32) / gamma)


def make_blocks(
    rows: Rows, anchors: Tensor, keep: Tensor, block_size: int, gamma: float, mask_token_id: int
) -> Blocks:
    """Labels, weights, tokens and positions of the blocks at `anchors` [R, N]."""
    count, size = anchors.shape[0], rows.tokens.shape[1]
    slots = torch.arange(1, block_size, device=anchors.device)
    wanted = anchors[:, :, None] + slots  # [R, N, B-1]
    index = wanted.clamp(max=size - 1)
    flat = index.flatten(1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, flat).view_as(index)

    same = at(rows.documents) == rows.documents.gather(1, anchors)[:, :, None]
    supervised = keep[:, :, None] & (wanted < size) & same & at(rows.supervised)
    tokens = torch.full((*anchors.shape, block_size), mask_token_id, device=anchors.device)
    tokens[:, :, 0] = torch.where(keep, rows.tokens.gather(1, anchors), mask_token_id)
    first = rows.positions.gather(1, anchors)[:, :, None]
    positions = first + torch.arange(block_size, device=anchors.device)
    return Blocks(
        anchors=anchors,
        keep=keep,
        labels=torch.where(supervised, at(rows.tokens), 0),
        label_index=index,
        supervised=supervised,
        weights=supervised * decay(block_size, gamma, anchors.device),
        positions=positions.view(count, -1),
        tokens=tokens.view(count, -1),
    )


def dpace_weights(confidence: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights (arXiv 2605.18810): how much a slot's cross-entropy moves the expected accepted length.

    With q_k the probability that slot k gives its label, smoothed to (1 - alpha) q_k + alpha, the expected
    accepted length is the sum over slots of the product of q up to that slot; a slot's weight is the part of
    that sum in which it occurs. Unsupervised slots leave the product as it is and get no weight. Constants to
    the optimizer.

    Args:
        confidence, supervised: [..., B-1].
    """
    smooth = torch.where(supervised, (1 - alpha) * confidence + alpha, 1.0)
    reach = smooth.cumprod(-1) * supervised
    return (reach.flip(-1).cumsum(-1).flip(-1) * supervised).detach()
