"""What the training pass makes of the blocks that real decoding drafted: the same, or training is not honest.

Every pass of a decoded text starts at an anchor of it. Here all those blocks go through the training pass
at once, with its mask, positions and labels, and their leading right slots are counted. It sees the
finished text, so only the mask keeps the future from it. Without a fault each block has exactly as many
right slots as decoding accepted. A mask that lets a block see what is not there when it is drafted shows as
more of them here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.data.packing import Rows
from trainer.evaluation.decode import Output
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.sections import Target as TargetSection
from trainer.sections import TrainConfig
from trainer.training.objective import make_blocks
from trainer.training.step import DrafterStep

WIDTH = 32  # blocks in one pass
SHORTEST = 128  # rows are this long, or twice, four times ...: few shapes to compile for


def training_step(drafter: Drafter, target: Target) -> DrafterStep:
    """The training pass in the precision of the weights."""
    narrow = drafter.fc.weight.dtype == torch.bfloat16
    recipe = TrainConfig(TargetSection(""), precision="bfloat16" if narrow else "float32")
    return DrafterStep(drafter, target, recipe, WIDTH)


@torch.no_grad()
def right_slots(step: DrafterStep, target: Target, prompt: Tensor, output: Output) -> list[int]:
    """For each pass of a greedy `output`, how many leading slots of its block the training pass gets right.

    Args:
        prompt: [P].
    """
    text = [*prompt.tolist(), *output.tokens]
    anchors, place = [], len(prompt)
    for emitted in output.emitted:
        anchors.append(place)
        place += emitted
    size = max(SHORTEST, 1 << (len(text) - 1).bit_length())
    tokens = torch.zeros(1, size, dtype=torch.int64, device=prompt.device)
    tokens[0, : len(text)] = torch.tensor(text)
    positions = torch.arange(size, device=prompt.device)[None]
    rows = Rows(tokens, torch.zeros_like(tokens), positions, positions < len(text))
    batch = Batch(rows, target.run(tokens, positions))
    config, found = step.drafter.config, []
    for start in range(0, len(anchors), WIDTH):
        part = anchors[start : start + WIDTH]
        padded = torch.tensor([part + [0] * (WIDTH - len(part))], device=prompt.device)
        keep = torch.arange(WIDTH, device=prompt.device)[None] < len(part)
        blocks = make_blocks(rows, padded, keep, config.block_size, math.inf, config.mask_token_id)
        said = (step.hidden(batch, blocks).to(step.head.dtype) @ step.head.T).argmax(-1)  # [N, B-1]
        right = (said == blocks.labels[0]) & blocks.supervised[0]
        found += right.long().cumprod(1).sum(1)[: len(part)].tolist()
    return found
