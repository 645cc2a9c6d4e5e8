"""The frozen target: a tapped model that also reads rows of several documents, fast where that is right.

Rows R, tokens S.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.model.architectures import decoder_of, pretrained, told_by_transformers
from trainer.model.plain_states import NEAR, far
from trainer.model.prefill import Prefill
from trainer.model.tapped_model import States, TappedModel
from trainer.model.within import dense_within, first_seen


class Target(TappedModel):
    """A tapped model and its way to read rows in which no document sees another."""

    def __init__(self, model: nn.Module, taps: Sequence[int]) -> None:
        super().__init__(model, taps)
        self.prefill = Prefill(self)

    def copied_to(self, device: torch.device) -> Target:
        """The same target on another device, or once more on this one: two threads must not share one."""
        model = copy.deepcopy(self.model)
        for layer in decoder_of(model).layers:
            layer._forward_hooks.clear()  # they record for this target
        made = Target(model.to(device), self.taps)
        made.prefill.like(self.prefill)
        return made

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor,
        full: bool = False,
        single: bool | None = None,
        again: bool = True,
    ) -> States:
        """States of packed rows in which no document sees another.

        Args:
            tokens, positions, documents: [R, S]; documents rise along a row; positions restart with each.
            single: every row is one document, if whoever has the rows on the host knows; None: looked at only
                where that costs no wait for a device.
            again: rows of this shape will come again, so it pays to compile for them.
        """
        if single is None and not documents.is_cuda:
            single = is_single(documents)
        if self.prefill.ready:
            return self.prefill.read(tokens, positions, documents, full, bool(single), again)
        if single or is_single(documents):
            return self.run(tokens, positions, full=full)
        plain = set(self.prefill.windows) == {None} and self.attention_only
        if plain and self.config._attn_implementation == "sdpa":
            return self.run(tokens, positions, mask=dense_within(first_seen(documents, None)), full=full)
        return self.one_document_at_a_time(tokens, positions, documents, full)


def is_single(documents: Tensor) -> bool:
    """Whether every row is one document. Waits for a device that the rows are on."""
    return bool((documents == documents[:, :1]).all())


def load_target(path: Path, taps: Sequence[int], dtype: torch.dtype, device: torch.device) -> Target:
    """Load the model in `path` (config.json and safetensors), frozen.

    Raises:
        ConfigError: it cannot be loaded, its files do not hold all its weights in the shapes of its
            config.json, or its logits are not its head's.
    """
    with told_by_transformers(
        "transformers cannot load the target",
        path,
        "it must hold config.json and weights of a decoder that transformers itself knows, and what it needs "
        "must be installed",
    ):
        model, report = pretrained(
            path,
            dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name and shapes
        )
    # transformers would fill all of these with random numbers and only warn.
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"{len(missing)} weights are missing, {missing[0]} first", where=str(path))
    if unlike := sorted(report["mismatched_keys"]):
        name, held, wanted = unlike[0]
        raise ConfigError(
            f"weight {name} is {tuple(held)}, by config.json it should be {tuple(wanted)}",
            where=str(path),
            next="the target's config.json and its weights do not belong together",
        )
    target = Target(model.to(device), taps)
    if (off := _head_off(target)) > NEAR:  # whatever key of its config.json bends them
        raise ConfigError(
            f"the target's logits are {off:.0%} off what its head makes of its last hidden states: drafters "
            "use embedding and head as they are",
            where=str(path),
            next="give a target that neither scales nor caps its logits",
        )
    return target


@torch.no_grad()
def _head_off(target: Target) -> float:
    """Relative distance of the target's own logits from its head's product with its last hidden states, which
    drafters, and whoever serves them, take for its choice.
    """
    tokens = 7919 * torch.arange(1, 9, device=target.device)[None] % target.vocabulary
    states = target.run(tokens, torch.arange(8, device=target.device)[None], full=True)
    assert states.final is not None
    return far(target.logits(states.final), target.model(input_ids=tokens, use_cache=False).logits)
