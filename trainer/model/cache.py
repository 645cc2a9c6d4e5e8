"""Keys and values of tokens already read, for the target (a transformers cache) and for the drafter.

Both write into buffers that grow by doubling, so a decoding step copies its own tokens, not the whole past,
and both hand out plain views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from trainer.model.drafter import KeyValue


def extended(buffer: Tensor | None, used: int, new: Tensor) -> Tensor:
    """A buffer [R, G, capacity, E] with `new` [R, G, T, E] written after the first `used` entries."""
    need = used + new.shape[2]
    if buffer is None or buffer.shape[2] < need:
        grown = new.new_empty(new.shape[0], new.shape[1], max(2 * need, 64), new.shape[3])
        if buffer is not None:
            grown[:, :, :used] = buffer[:, :, :used]
        buffer = grown
    buffer[:, :, used:need] = new
    return buffer


class BufferLayer(DynamicLayer):
    """transformers' growing cache layer without its copy of all keys and values at every step."""

    def __init__(self) -> None:
        super().__init__()
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.get_seq_length()
        need = used + key_states.shape[2]
        self._key_buffer = extended(self._key_buffer, used, key_states)
        self._value_buffer = extended(self._value_buffer, used, value_states)
        self.keys = self._key_buffer[:, :, :need]
        self.values = self._value_buffer[:, :, :need]
        return self.keys, self.values


def target_cache(layers: int) -> Cache:
    """An empty cache for a target whose layers all attend to everything."""
    return Cache(layers=[BufferLayer() for _ in range(layers)])


class DraftContext:
    """The context in every drafter layer: keys, values, each entry's position and whether it is alive.

    Rows of a batch accept different numbers of tokens, so entries of rejected tokens stay and are masked.
    """

    def __init__(self, layers: int) -> None:
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        self.alive = torch.empty(0, 0, dtype=torch.bool)

    def append(self, new: Sequence[KeyValue], positions: Tensor, alive: Tensor) -> None:
        """Add T tokens: `new` per layer [R, G, T, E], positions and alive [R, T]."""
        used = self.positions.shape[1]
        for layer, (keys, values) in enumerate(new):
            self._keys[layer] = extended(self._keys[layer], used, keys)
            self._values[layer] = extended(self._values[layer], used, values)
        if used == 0:
            self.positions, self.alive = positions, alive
        else:
            self.positions = torch.cat((self.positions, positions), dim=1)
            self.alive = torch.cat((self.alive, alive), dim=1)

    def keys_values(self) -> list[KeyValue]:
        used = self.positions.shape[1]
        return [
            (keys[:, :, :used], values[:, :, :used])
            for keys, values in zip(self._keys, self._values, strict=True)
            if keys is not None and values is not None
        ]

    def mask(self, start: Tensor, block_size: int, window: int | None) -> Tensor:
        """[R, 1, B, C + B] bool, trainer.model.mask's rule for blocks anchored at positions `start` [R]."""
        rows, device = start.shape[0], start.device
        slot = torch.arange(block_size, device=device)
        context = self.alive & (self.positions < start[:, None])
        context = context[:, None, :].expand(rows, block_size, -1)
        own = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
        if window is not None:
            low = start[:, None] + slot - (window - 1)  # [R, B]
            context = context & (self.positions[:, None, :] >= low[:, :, None])
            own = own.tril()
        return torch.cat((context, own.expand(rows, -1, -1)), dim=2)[:, None]
