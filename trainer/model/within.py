"""Who sees whom in the target: a query sees its document's tokens up to itself, in a sliding layer of window
W only the last W of them. Keys are the row's own tokens.

Per query that is one interval of keys, [first, query], so one tensor says it all. The padding behind a row's
last document counts as a document.

Rows R, row tokens S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.mask import MaskMod


def first_seen(documents: Tensor, window: int | None) -> Tensor:
    """[R, S] the first token that each query sees.

    Args:
        documents: [R, S] a number for each document; neighbouring documents differ.
        window: tokens that a query reaches back over, itself included; None: a full layer.
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(starts, index, 0).cummax(1).values
    return first if window is None else torch.maximum(first, index - (window - 1))


def within_mod(first: Tensor) -> MaskMod:
    """The rule in flex attention's form; the head index is ignored, so one mask serves all heads."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[row, query]) & (key <= query)

    return visible


def dense_within(first: Tensor) -> Tensor:
    """[R, 1, S, S] bool, true where seen: for scaled_dot_product_attention."""
    index = torch.arange(first.shape[1], device=first.device)
    return ((index >= first[..., None]) & (index <= index[:, None]))[:, None]
