"""The loss's Triton kernel by Triton's interpreter, which needs no GPU, beside float64 arithmetic.

For each case the largest errors of gradient and loss, and whether all of `right` are.
"""

from __future__ import annotations

import torch

from trainer.training import errors_kernel

errors_kernel.COLUMNS, errors_kernel.DEEP = 16, 4


def case(dtype: torch.dtype, words: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(words)
    logits = (4 * torch.randn(7, words, generator=generator)).to(dtype)
    labels = torch.randint(words, (7,), generator=generator)
    logits[0, labels[0]] = 40  # sure
    logits[1, :] = logits[1, 0]  # all equal: the first is the most likely
    labels[1] = 0
    logits[2, -1], labels[2] = 30, words - 1  # the last column of a ragged block
    logits[3, :] = -300.0  # far below where exp underflows
    logits[3, labels[3]] = -290.0
    logits[4, words // 2 :] += 200  # a larger maximum comes late
    logits[6, words // 2], logits[6, -1] = 150, 290  # far above what came before, twice
    logits[5, 1], logits[5, 0], labels[5] = 50, 50, 1  # as likely as an earlier one: wrong
    exact = logits.double()
    log_p = exact.log_softmax(-1)
    wanted = log_p.exp()
    wanted[torch.arange(7), labels] -= 1
    found = logits.clone()
    scales, losses, right = errors_kernel.errors_in_place(found, labels)
    found = found.double() * scales.double()[:, None]
    return {
        "dtype": str(dtype),
        "words": words,
        "gradient": float((found - wanted).abs().max()),
        "loss": float((losses + log_p.gather(-1, labels[:, None])[:, 0]).abs().max()),
        "right": right.tolist() == (exact.argmax(-1) == labels).tolist(),
        "rights": right.tolist()[:6],
    }


def run() -> list[dict[str, object]]:
    return [case(dtype, words) for dtype in (torch.float32, torch.bfloat16) for words in (64, 200, 1000)]
