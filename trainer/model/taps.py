"""What a tap is: tap i is the output of the target's decoder layer i, counted from 0, before any final norm.

In transformers' `hidden_states` tuple that is entry i + 1, because entry 0 is the embedding's output. The
last layer is no tap: its entry there has the final norm applied, in serving engines it has not, so a drafter
trained on one would be served the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trainer.errors import ConfigError


def default_taps(target_layers: int, count: int) -> list[int]:
    """`count` target layers spread evenly from layer 1 to layer L-3; a single tap is the middle layer L // 2.

    This is the rule by which published drafters were built (36 layers, 5 taps: 1, 9, 17, 25, 33).
    """
    if count == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + k * (last - first) / (count - 1)) for k in range(count)]


def check_taps(taps: Sequence[int], target_layers: int) -> list[int]:
    """The taps, if the target can give them: rising, each from 0 to L-2.

    Raises:
        ConfigError: out of range, repeated or not rising.
    """
    where = "train.drafter.taps"
    for tap in taps:
        if tap == target_layers - 1:
            raise ConfigError(
                f"tap {tap} is the target's last layer: serving engines disagree about its final norm",
                where=where,
                next=f"use layers 0 to {target_layers - 2}",
            )
        if not 0 <= tap < target_layers:
            raise ConfigError(
                f"tap {tap} is out of range: the target has layers 0 to {target_layers - 1}",
                where=where,
                next=f"use layers 0 to {target_layers - 2}",
            )
    if not taps or any(left >= right for left, right in pairwise(taps)):
        raise ConfigError(
            f"taps {list(taps)} of a target with {target_layers} layers are not a rising list",
            where=where,
            next="name the layers in drafter.taps",
        )
    return list(taps)
