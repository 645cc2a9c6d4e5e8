"""Which tokens of packed rows may start a block, and how many of them a row can have.

Rows R, row tokens S. Of a store's rows, before they are packed: stored.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.data.packing import Rows


def valid_anchors(rows: Rows) -> Tensor:
    """[R, S] bool: tokens that may start a block.

    Such a token is supervised, so is its successor in the same document, and it has a token of context before
    it.
    """
    follows = torch.zeros_like(rows.supervised)
    follows[:, :-1] = rows.supervised[:, 1:] & (rows.documents[:, 1:] == rows.documents[:, :-1])
    return rows.supervised & follows & (rows.positions >= 1)


def needed_width(rows: Rows, per_document: int) -> int:
    """The most anchors that any row can have: the fixed width that never has to leave one out.

    Reads the data: for the set-up, not for the step.
    """
    valid = valid_anchors(rows)
    documents = int(rows.documents.max()) + 1
    counts = torch.zeros(len(rows), documents, dtype=torch.int64).scatter_add_(
        1, rows.documents.cpu(), valid.cpu().long()
    )
    return max(1, int(counts.clamp(max=per_document).sum(1).max()))
